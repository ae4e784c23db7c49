"""The arithmetic of the benchmark and what it writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftline.bench.machine import describe_machine
from draftline.bench.report import Report, import_matplotlib, load_report, write_report, write_table
from draftline.bench.rounds import Measurement, compute_ratio, measure_rounds
from draftline.bench.timeline import Timeline, decode_tokens_per_second, first_token_ms
from draftline.bench.workloads import decode_workload, write_prompt
from draftline.errors import ArtifactError, DraftlineError, MissingPackageError

WORKLOAD = "decode, batch 1"


class ScriptedSystem:
    """Its answer has a token every ``1 / speed`` seconds, after a prefill of 10 seconds."""

    def __init__(self, name: str, speed: float) -> None:
        self.name, self._speed = name, speed
        self.asked: list[int] = []

    def answer(self, prompts: Sequence[str], num_tokens: int) -> list[Timeline]:
        self.asked.append(num_tokens)
        return [Timeline(0.0, [(10 + place / self._speed, place + 1) for place in range(num_tokens)]) for _ in prompts]


def make_report() -> Report:
    measurements = (
        Measurement("fast", WORKLOAD, "tokens/s", (40.0, 50.0, 45.0)),
        Measurement("slow", WORKLOAD, "tokens/s", (10.0, 25.0, 15.0)),
    )
    ratios = tuple(compute_ratio(measurements, WORKLOAD, "fast", "slow", goal) for goal in (3.0, 3.1, None))
    return Report(describe_machine(), {"num_rounds": 3}, measurements, ratios)


def test_only_decoding_at_the_full_batch_counts() -> None:
    early = Timeline(0.0, [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)])
    late = Timeline(0.0, [(2.5, 1), (3.5, 4), (9.0, 5)])
    assert decode_tokens_per_second([early]) == 1.0
    assert decode_tokens_per_second([early, late]) == pytest.approx((2 + 3) / 1.5)
    assert first_token_ms([early, late]) == 2500.0


def test_answers_that_did_not_run_together_are_refused() -> None:
    with pytest.raises(DraftlineError, match="decode at the same time"):
        decode_tokens_per_second([Timeline(0.0, [(1.0, 1), (2.0, 2)]), Timeline(0.0, [(3.0, 1), (4.0, 2)])])


def test_ratios_divide_within_a_round_and_judge_the_median() -> None:
    passes, fails, free = make_report().ratios
    assert passes.values == (4.0, 2.0, 3.0)
    assert (passes.passed, fails.passed, free.passed) == (True, False, None)


def test_every_round_measures_every_system_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.bench.rounds.SETTLE_SECONDS", 0.0)
    systems = [ScriptedSystem("fast", 8.0), ScriptedSystem("slow", 2.0)]
    said: list[str] = []
    measurements = measure_rounds(systems, [decode_workload(1, 12)], 3, said.append)
    assert {one.system: one.values for one in measurements} == {
        "fast": pytest.approx((8.0,) * 3),
        "slow": pytest.approx((2.0,) * 3),
    }
    assert systems[0].asked == [5, 12, 12, 12]
    assert [line.split(": ")[1].split()[0] for line in said] == ["fast", "slow", "slow", "fast", "fast", "slow"]


def test_prompts_have_their_length_and_differ_from_their_first_token_on() -> None:
    def count(text: str) -> int:
        return len(text.split())

    prompts = [write_prompt(number, 512, count) for number in range(3)]
    assert {count(prompt) for prompt in prompts} == {512}
    assert len({prompt.split()[0] for prompt in prompts}) == 3


def test_the_table_shows_spread_and_verdict() -> None:
    table = write_table(make_report())
    assert "45.0 [40.0, 50.0] tokens/s" in table
    assert "3.00 [2.00, 4.00]  goal 3: pass" in table
    assert "3.00 [2.00, 4.00]  goal 3.1: FAIL" in table


@pytest.mark.parametrize(("load", "is_busy"), [(0.1, False), (3.2, True)])
def test_the_table_warns_of_a_busy_machine(load: float, is_busy: bool) -> None:
    report = make_report()
    report.machine["load_average"] = (load, 0.0, 0.0)
    assert ("do not quote these numbers" in write_table(report)) is is_busy


def test_a_report_leaves_json_and_a_plot_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_report(make_report(), tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "bench.png"]
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert document["measurements"][0]["median"] == 45.0
    assert [ratio["passed"] for ratio in document["ratios"]] == [True, False, None]
    assert document["machine"]["num_cores"] >= 1


def test_without_matplotlib_the_cure_is_a_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'draftline\[bench\]'"):
        import_matplotlib()


def test_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    report = make_report()
    write_report(report, tmp_path, lambda report, path: path.touch())
    read = load_report(tmp_path / "bench.json")
    assert (read.measurements, read.ratios) == (report.measurements, report.ratios)
    assert write_table(read) == write_table(report)


@pytest.mark.parametrize("text", [None, "{", "{}"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"is the bench\.json of a benchmark; got .*; run the benchmark again"):
        load_report(tmp_path / "bench.json")

"""Pages show what the CPU benchmark measured, and say where nothing was."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.bench import cpu_page
from draftline.bench.cpu_page import BLOCKS, NOT_MEASURED, fill_page, main
from draftline.bench.machine import describe_machine
from draftline.bench.report import Report, write_report
from draftline.bench.rounds import Measurement, compute_ratio
from draftline.errors import DraftlineError

DECODE = "decode, batch 1, context 64"
ONE, EIGHT = (f"step of {count} tokens, batch 1, context 256" for count in (1, 8))
FORWARD = "forward, batch 16, context 1024"
PAGE = "Before.\n<!-- cpu.json: {} -->\nold\n<!-- end -->\nAfter.\n"


def make_report() -> Report:
    measurements = (
        Measurement("read bandwidth, float32", DECODE, "GB/s", (20.0, 24.0)),
        Measurement("floor float32", DECODE, "tokens/s", (50.0, 50.0)),
        Measurement("draftline float32", DECODE, "tokens/s", (40.0, 45.0)),
        Measurement("transformers float32", DECODE, "tokens/s", (20.0, 30.0)),
        Measurement("native float32", ONE, "ms", (20.0, 22.0)),
        Measurement("native float32", EIGHT, "ms", (25.0, 33.0)),
        Measurement("float32 pool", FORWARD, "ms", (30.0, 50.0)),
        Measurement("float32 pool, no attention", FORWARD, "ms", (20.0, 20.0)),
    )
    curve = (
        compute_ratio(
            [m for m in measurements if m.workload == EIGHT] + [Measurement("one", EIGHT, "ms", (20.0, 22.0))],
            EIGHT,
            "native float32",
            "one",
            1.4,
            at_most=True,
        ),
    )
    ratios = (
        compute_ratio(measurements, DECODE, "draftline float32", "floor float32", 0.8),
        compute_ratio(measurements, DECODE, "draftline float32", "transformers float32", 2.0),
        *(type(ratio)(EIGHT, ratio.system, ONE, ratio.values, ratio.goal, ratio.at_most) for ratio in curve),
        compute_ratio(measurements, FORWARD, "float32 pool", "float32 pool, no attention", 2.0, at_most=True),
    )
    findings = {
        "profile: float32, batch 1, context 512 (ms of a forward)": {"Gemm": 19.5, "Add": 0.01},
        "profile: int8, batch 1, context 512 (ms of a forward)": {"QuantizedMatMul": 6.25, "Gather": 0.02},
    }
    return Report(describe_machine(), {}, measurements, ratios, findings, notes=("A note.",))


def fill(name: str, report: Report | None = None) -> list[str]:
    page = fill_page(PAGE.format(name), report or make_report())
    assert page.startswith(f"Before.\n<!-- cpu.json: {name} -->\n\n")
    assert page.endswith("\n\n<!-- end -->\nAfter.\n")
    assert fill_page(page, report or make_report()) == page
    return page.splitlines()[3:-3]


def test_speeds_stand_beside_ratios_and_goals() -> None:
    assert fill("decode") == [
        "| float32 | draftline | / floor | / `openvino-genai` | / `transformers`, float32 |",
        "| --- | --- | --- | --- | --- |",
        "| batch 1, context 64 | 42.5 tokens/s | **0.85** [0.80, 0.90] | not measured | 1.75 [1.50, 2.00], goal 2 |",
    ]


def test_a_summary_has_a_column_for_each_batch() -> None:
    assert fill("summary") == [
        "| | batch 1 |",
        "| --- | --- |",
        "| draftline float32 | 42.5 tokens/s |",
        "| / floor | **0.85** [0.80, 0.90] |",
        "| / `openvino-genai` | not measured |",
        "| / `transformers`, float32 | 1.75 [1.50, 2.00], goal 2 |",
    ]


def test_steps_are_compared_with_one_token() -> None:
    title, _, row = fill("curve")
    assert title == "| | T = 1 | T = 8 |"
    assert row == "| native float32 | 21.0 ms | **1.38** [1.25, 1.50] |"


def test_attention_and_missed_goals() -> None:
    _, _, row = fill("attention")
    assert row == "| forward, batch 16, context 1024, float32 pool | 2.00 [1.50, 2.50] | 2 at most, met |"
    count, _, _, _, missed = fill("goals")
    assert count == "3 of 4 goals were met."
    assert missed == f"| {DECODE}: draftline float32 / transformers float32 | 1.75 [1.50, 2.00] | 2 at least |"


def test_profiles_sum_what_is_small() -> None:
    assert fill("profile")[2:] == [
        "| `Gemm` | 19.50 | |",
        "| `QuantizedMatMul` | | 6.25 |",
        "| others | 0.01 | 0.02 |",
        "| all | 19.51 | 6.27 |",
    ]


def test_the_run_is_described() -> None:
    *_, note, bandwidth, links = fill("run")
    assert note == "- A note."
    assert bandwidth == "- read bandwidth 22.0 [20.0, 24.0] GB/s, measured around each of this engine's turns"
    assert links == "- [all numbers](bench/cpu.json), [plot](bench/cpu.png)"


@pytest.mark.parametrize("name", BLOCKS)
def test_what_was_not_measured_is_said(name: str) -> None:
    assert NOT_MEASURED in fill_page(PAGE.format(name), None)
    nothing = Report(describe_machine(), {}, (), ())
    if name not in ("run", "goals"):
        assert fill(name, nothing) == [NOT_MEASURED]


def test_runs_are_published_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, numbers = tmp_path / "run", tmp_path / "cpu.json"
    write_report(make_report(), run, lambda report, path: path.touch())
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text(PAGE.format("goals"))
    bad.write_text(PAGE.format("speed"))
    monkeypatch.setattr(cpu_page, "NUMBERS", numbers)
    monkeypatch.setattr(cpu_page, "PAGES", (good, bad))
    assert main([str(run)]) == 2
    assert "blocks are some of run, " in capsys.readouterr().err
    assert "old" in good.read_text()
    assert not numbers.exists()
    with pytest.raises(DraftlineError, match="got speed"):
        fill_page(bad.read_text(), None)
    monkeypatch.setattr(cpu_page, "PAGES", (good,))
    assert main([]) == 2
    assert main([str(run)]) == 0
    assert "3 of 4 goals were met." in good.read_text()
    assert sorted(path.name for path in tmp_path.glob("cpu.*")) == ["cpu.json", "cpu.png"]
    good.write_text(PAGE.format("goals"))
    assert main([]) == 0
    assert "3 of 4 goals were met." in good.read_text()

"""The CPU benchmark on a tiny checkpoint, and its arithmetic on stand-ins."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftline.bench import cpu, cpu_decode, cpu_steps
from draftline.bench.cpu import SECTIONS, Settings, main, run_cpu_bench
from draftline.bench.cpu_bandwidth import ReadBandwidth
from draftline.bench.cpu_decode import Case, Floor, compare_answers, compare_decoding, measure_decoding, write_prompts
from draftline.bench.cpu_report import draw_cpu_report, write_cpu_table
from draftline.bench.cpu_systems import Answers, Prompts
from draftline.bench.report import write_report
from draftline.bench.rounds import Measurement, Ratio
from draftline.bench.timeline import Timeline
from draftline.checkpoints.convert import convert_checkpoint
from draftline.sessions.native_kernels import instruction_set
from tests.tiny_checkpoints import write_tiny_checkpoint

TINY = Settings(
    num_rounds=2,
    batch_sizes=(1,),
    num_tokens={20: 6, 40: 6},
    max_context_tokens=64,
    max_transformers_tokens=20,
    num_answers=2,
    num_answer_tokens=6,
    num_step_rounds=1,
    row_counts=(1, 8),
    num_profiled_forwards=1,
)


class ScriptedSystem:
    """Decodes ``speed`` tokens a second in every sequence, token ids from ``first_id`` on."""

    def __init__(self, name: str, speed: float, max_context_tokens: int = 1000, first_id: int = 0) -> None:
        self.name, self.max_context_tokens = name, max_context_tokens
        self._speed, self._first_id = speed, first_id
        self.prefilled: list[int] = []
        self.asked: list[tuple[int, int]] = []

    def prefill(self, prompts: Prompts) -> None:
        self.prefilled += [len(prompt) for prompt in prompts]

    def answer(self, prompts: Prompts, num_tokens: int) -> Answers:
        self.asked.append((len(prompts), len(prompts[0])))
        events = [(place / self._speed, place + 1) for place in range(num_tokens)]
        answer = [self._first_id if place == 2 else 7 for place in range(num_tokens)]
        return [Timeline(0.0, list(events)) for _ in prompts], [list(answer) for _ in prompts]


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(cpu_steps, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("draftline.bench.cpu_bandwidth.NUM_BYTES", 2**22)


def convert_tiny(folder: Path) -> Path:
    source = write_tiny_checkpoint(folder / "source", head_dim=64)
    checkpoint = folder / "build" / "checkpoint"
    checkpoint.mkdir(parents=True)
    convert_checkpoint(source, checkpoint, "float32", lambda done, total: None)
    return folder / "build"


def speeds(measurements: Sequence[Measurement], system: str, case: Case) -> tuple[float, ...]:
    (found,) = (one for one in measurements if (one.system, one.workload) == (system, case.name))
    return found.values


def test_the_floor_counts_weights_once_and_live_tokens_of_every_sequence() -> None:
    floor = Floor("int8", weight_bytes=1000, kv_bytes=10)
    assert floor.tokens_per_second(Case(1, 0, 1), 1000.0) == 1.0
    # Steps of a case see 20, 21, 22 tokens: 21 in the mean.
    assert floor.tokens_per_second(Case(2, 20, 3), 1420.0) == pytest.approx(2.0)


def test_read_bandwidth_is_that_of_a_memory_and_not_of_a_page() -> None:
    assert 1e8 < ReadBandwidth().measure() < 1e13


def test_prompts_differ_and_are_the_same_every_time() -> None:
    prompts = write_prompts(3, 5, 100)
    assert prompts == write_prompts(3, 5, 100)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {5}


def test_every_system_is_measured_where_it_is_not_cut_and_compared_there() -> None:
    mine, other = ScriptedSystem("draftline float32", 8.0), ScriptedSystem("openvino-genai float32", 4.0)
    cut = ScriptedSystem("transformers float32", 2.0, max_context_tokens=10)
    cases = [Case(1, 10, 3), Case(2, 10, 3)]
    prompts = write_prompts(2, 10, 100)
    floor = Floor("float32", 10**12, 0)
    measured = measure_decoding([mine, other, cut], [floor], cases, prompts, 2, lambda line: None)
    assert speeds(measured, "draftline float32", cases[1]) == pytest.approx((16.0, 16.0))
    assert mine.prefilled == [10, 10]
    assert cut.prefilled == [10]
    assert cut.asked == [(1, 10)] * 2
    ratios = {(ratio.workload, ratio.reference): ratio for ratio in compare_decoding(measured, cases)}
    assert ratios[cases[0].name, "transformers float32"].values == pytest.approx((4.0, 4.0))
    assert (cases[1].name, "transformers float32") not in ratios
    assert ratios[cases[0].name, "openvino-genai float32"].goal == 1.1
    assert ratios[cases[1].name, "openvino-genai float32"].goal is None  # batch 2 has none
    bandwidth, bound = (speeds(measured, name, cases[0]) for name in ("read bandwidth, float32", "floor float32"))
    assert bound == pytest.approx([number / 1000 for number in bandwidth])


def test_answers_agree_up_to_the_first_token_that_differs() -> None:
    systems = [ScriptedSystem("a", 1.0, first_id=1), ScriptedSystem("b", 1.0, first_id=1), ScriptedSystem("c", 1.0)]
    assert compare_answers(systems, [[1], [2]], 4, "a") == {"b": 1.0, "c": 0.5}


@pytest.mark.parametrize(("at_most", "passes"), [(True, [True, False]), (False, [True, True])])
def test_goals_are_bounds_from_one_side(at_most: bool, passes: list[bool]) -> None:
    ratios = [Ratio("w", "s", "r", (value,), 1.4, at_most) for value in (1.4, 1.5)]
    assert [ratio.passed for ratio in ratios] == passes


def test_all_sections_measure_a_tiny_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("matplotlib", "torch", "transformers"):
        pytest.importorskip(package)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        cpu.importlib.util, "find_spec", lambda name: None if name in ("openvino_genai", "nncf") else find_spec(name)
    )
    monkeypatch.setattr(cpu, "ATTENTION_CASES", ((2, 32, "float32", 2.0), (2, 32, "float16", 1.6)))
    monkeypatch.setattr(cpu, "CURVE_CONTEXT", 32)
    report = run_cpu_bench(convert_tiny(tmp_path), TINY, lambda line: None, tmp_path / "out")
    assert report.findings[cpu._AGREEMENT]["draftline float32"] == 1.0
    kernels = "onnxruntime" if instruction_set() is None else "native"
    by_name = {(ratio.workload, ratio.system, ratio.reference): ratio for ratio in report.ratios}
    for precision, goal in cpu_decode.FLOOR_GOALS.items():
        name = "decode, batch 1, context 20", f"draftline {precision}", f"floor {precision}"
        assert by_name[name].goal == goal
    assert ("decode, batch 1, context 40", "draftline int8", "floor int8") in by_name
    assert not any("context 40" in workload for workload, _, reference in by_name if reference.startswith("transf"))
    eight = by_name["step of 8 tokens, batch 1, context 32", f"{kernels} float32", "of one token"]
    assert len(eight.values) == 1
    if kernels == "native":
        with_attention = by_name["forward, batch 2, context 32", "float16 pool", "float16 pool, no attention"]
        assert statistics.median(with_attention.values) > 0
        profile = report.findings["profile: float32, batch 16, context 512 (ms of a forward)"]
        assert profile["TreeAttention"] > 0
    table = write_cpu_table(report)
    assert "openvino-genai was not measured: openvino_genai, nncf not installed; pip install" in table
    assert "transformers float32 was cut: decode, batch 1, context 40" in table
    write_report(report, tmp_path / "out", draw_cpu_report)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "bench.png"]
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert document["notes"] == list(report.notes)


def test_unknown_sections_are_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), "--output", str(tmp_path / "out"), "--sections", "decode,speed"]) == 2
    assert f"are some of {', '.join(SECTIONS)}; got speed; name sections" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

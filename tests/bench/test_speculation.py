"""The speculation benchmark, on a tiny build and stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.bench.host_overhead import measure_host_overhead
from draftline.bench.report import write_report, write_table
from draftline.bench.speculation import HOST_CASES, Settings, describe_acceptance, main, run_speculation_bench
from draftline.bench.systems import InProcessSystem
from draftline.config import Pipeline
from draftline.errors import DraftlineError
from draftline.runtime.speculation_numbers import SpeculationNumbers
from draftline.speculation import TreeShape
from draftline.stages.runner import run_pipeline
from tests.tiny_checkpoints import write_tiny_checkpoint

TINY = Settings(num_rounds=2, num_tokens=64, batch_sizes=(1, 3), num_host_steps=3)


def build(root: Path, **blocks: Any) -> Path:
    write_tiny_checkpoint(root / "model", num_layers=1)
    document = {
        "name": "tiny",
        "target": {"checkpoint": "model"},
        "engine": {"max_seq_len": 256, "max_batch_size": 4},
        "kv_cache": {"max_blocks": 128},
        **blocks,
    }
    run_pipeline(Pipeline.model_validate(document), root / "build", root=root, until="build")
    return root / "build"


def test_measures_both_systems_acceptance_and_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("draftline.bench.rounds.SETTLE_SECONDS", 0.0)
    report = run_speculation_bench(build(tmp_path, draft={"method": "ngram"}), TINY, lambda line: None)
    assert [(one.system, one.workload) for one in report.measurements[:4]] == [
        (system, f"decode, batch {size}") for size in (1, 3) for system in ("plain", "speculating")
    ]
    assert len(report.measurements) == 4 + len(HOST_CASES)
    assert [(ratio.system, ratio.reference, ratio.goal) for ratio in report.ratios] == [
        ("speculating", "plain", 0.97)
    ] * 2
    assert report.findings["acceptance, batch 3"]["acceptance_length"] >= 1.0
    table = write_table(report)
    assert "acceptance_length" in table
    assert "host per step, batch 16" in table
    assert "transformers" not in table.split("\n\n", 1)[1]
    write_report(report, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert document["findings"]["acceptance, batch 1"] == report.findings["acceptance, batch 1"]


def test_a_users_prompts_are_asked_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.bench.rounds.SETTLE_SECONDS", 0.0)
    asked: list[str] = []
    answer = InProcessSystem.answer

    def note(system: InProcessSystem, prompts: Any, num_tokens: int) -> Any:
        asked.extend(prompts)
        return answer(system, prompts, num_tokens)

    monkeypatch.setattr(InProcessSystem, "answer", note)
    prompts = [f"prompt {number}" for number in range(9)]
    settings = Settings(num_rounds=2, num_tokens=64, batch_sizes=(1, 3), num_host_steps=3)
    report = run_speculation_bench(build(tmp_path, draft={"method": "ngram"}), settings, lambda line: None, prompts)
    assert report.settings["num_prompts"] == 9
    assert {prompt for prompt in prompts if any(prompt in one for one in asked)} == set(prompts)
    assert all(one.startswith("<|im_start|>user\nprompt") for one in asked)


def test_a_build_without_a_draft_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plain = build(tmp_path)
    assert main([str(plain), "--output", str(tmp_path / "out")]) == 2
    assert "has a draft; got none; bench a pipeline with a `draft` block" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_engine_too_small_for_a_batch_is_refused(tmp_path: Path) -> None:
    small = build(tmp_path, draft={"method": "ngram"})
    with pytest.raises(DraftlineError, match="holds the largest batch, 16; got 4"):
        run_speculation_bench(small, Settings(), lambda line: None)


@pytest.mark.parametrize("kind", ["dynamic", "chain"])
def test_host_overhead_leaves_the_sessions_out(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.bench.host_overhead._TARGET_MS", 100.0)
    milliseconds = measure_host_overhead(
        TreeShape(kind, 6, 3, 2), batch_size=2, num_steps=3, reads_weights=kind != "chain"
    )
    assert len(milliseconds) == 3
    assert 0.0 < min(milliseconds) < 100.0


def test_acceptance_is_described_by_depth() -> None:
    numbers = SpeculationNumbers(
        num_steps=4, num_drafted_tokens=12, num_verified_tokens=8, num_accepted_tokens=3, histogram=(2, 1, 1)
    )
    assert describe_acceptance(numbers) == {
        "acceptance_length": 1.75,
        "acceptance_rate": 0.25,
        "drafted per step": 3.0,
        "verified per step": 2.0,
        "acceptance_rate_at[1]": 0.5,
        "acceptance_rate_at[2]": 0.25,
    }

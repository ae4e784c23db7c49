"""Trainings are collected, and shown on pages, as they were."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import ArtifactError, DraftlineError
from draftline.training import collect, page, results
from draftline.training.acceptance_report import Acceptance, AcceptanceReport, write_report
from draftline.training.collect import load_training
from draftline.training.page import BLOCKS, NOT_MEASURED, fill_page
from draftline.training.results import Point, Results, Training, fit_trend, load_results

PAGE = "Before.\n<!-- training.json: {} -->\nold\n<!-- end -->\nAfter.\n"
DATA = {
    "sha256": "5ea1",
    "num_sequences": 1000,
    "num_tokens": 200_000,
    "num_answer_tokens": 150_000,
    "temperature": 0.7,
    "max_tokens": 384,
    "prompts": ["own", "topics"],
}
MACHINE = {
    "processor": "A processor",
    "flags": {"avx2": True, "amx_int8": False},
    "num_cores": 2,
    "versions": {"torch": "2.13.0", "numpy": "1.26"},
}
LENGTHS = {"eagle3": 1.0, "eagle3-1-step": 0.5, "medusa": 0.25}


def make_training(draft: str, scale: float) -> Training:
    method, _, steps = draft.partition("-")
    curve = [Point(100_000 * step, 30.0 * step, 9.0, (0.1 * scale * step, 0.05 * scale * step)) for step in range(5)]
    settings = {"ttt_steps": 1 if steps else 5, "draft_vocab_size": 12288} if method == "eagle3" else {}
    training: dict[str, Any] = {"steps": 7, "tokens": 400_000, "seconds": 120.0}
    if method == "eagle3":
        training["draft_vocab_coverage"] = 0.9705
    training["held_back"] = {
        "step": 7,
        "is_validation": True,
        **vars(curve[-1]),
        "acceptance": [0.4 * scale, 0.2 * scale],
    }
    provenance = {
        "method": method,
        "draftline_version": "0.1.0",
        "settings": settings,
        "data": DATA,
        "training": training,
        "machine": MACHINE,
    }
    return Training(draft, provenance, 24_480_000, tuple(curve))


def make_acceptance() -> AcceptanceReport:
    entries = [
        Acceptance(draft, draft.partition("-")[0], held_out, 80, 9000, 5000, 1 + 0.6 * scale, 0.3, rates, 2.0)
        for draft, scale in {**LENGTHS, "n-gram lookup": 0.1}.items()
        for held_out in ("mt-bench", "human-eval")
        for rates in [(0.4 * scale, 0.2 * scale)]
    ]
    settings = {"held_out": ["mt-bench", "human-eval"], "max_tokens": 128, "max_depth": 2, "weights_dtype": "int8"}
    return AcceptanceReport(MACHINE, settings, tuple(entries))


def make_results() -> Results:
    return Results(make_acceptance(), tuple(make_training(*pair) for pair in LENGTHS.items()))


def write_run(root: Path, found: Results) -> list[str]:
    """Write what ``draftline train`` and the measurement leave; return the words of ``collect``."""
    words = [str(root / "measured")]
    write_report(found.acceptance, root / "measured")
    for training in found.trainings:
        build, draft = root / training.draft, root / "drafts" / training.draft
        (build / "train").mkdir(parents=True)
        draft.mkdir(parents=True)
        entries = [{"step": 1, "is_validation": True, **vars(point)} for point in training.curve[:-1]]
        lines = [{"step": 3, "tokens": 5}, *entries, training.provenance["training"]["held_back"]]
        (build / "train/log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (draft / "provenance.json").write_text(json.dumps(training.provenance))
        (draft / "model.safetensors").write_bytes(bytes(10))
        words.append(f"{build}={draft}")
    return words


def fill(name: str, found: Results | None = None) -> list[str]:
    filled = fill_page(PAGE.format(name), found or make_results())
    assert filled.startswith(f"Before.\n<!-- training.json: {name} -->\n\n")
    assert filled.endswith("\n\n<!-- end -->\nAfter.\n")
    assert fill_page(filled, found or make_results()) == filled
    return filled.splitlines()[3:-3]


def test_examples() -> None:
    assert doctest.testmod(results) == (0, 4)


def test_what_is_collected_is_what_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = make_results()
    words = write_run(tmp_path, found)
    assert collect.main(words) == 0
    assert capsys.readouterr().out == f"python -m draftline.training.page {words[0]}\n"
    expected = replace(found, trainings=tuple(replace(training, num_bytes=10) for training in found.trainings))
    assert load_results(tmp_path / "measured/training.json") == expected
    assert (tmp_path / "measured/training.png").read_bytes().startswith(b"\x89PNG")


def test_a_draft_of_another_training_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, make_results())
    with pytest.raises(
        ArtifactError, match=r"its provenance.json ends as .*/medusa/train/log.jsonl does; got 400000 tok"
    ):
        load_training(tmp_path / "medusa", tmp_path / "drafts/eagle3")
    with pytest.raises(ArtifactError, match=r"drafts/absent: was trained in .*; got FileNotFoundError"):
        load_training(tmp_path / "medusa", tmp_path / "drafts/absent")
    (tmp_path / "drafts/medusa/provenance.json").write_text("{}")
    with pytest.raises(ArtifactError, match="got KeyError"):
        load_training(tmp_path / "medusa", tmp_path / "drafts/medusa")


def test_trainings_that_do_not_belong_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = make_results()
    first, second, _ = found.trainings
    more = replace(second, provenance={**second.provenance, "data": {**DATA, "sha256": "0dd", "num_tokens": 400_000}})
    assert collect.main(write_run(tmp_path / "more", Results(found.acceptance, (first, more)))) == 0
    capsys.readouterr()
    other = replace(second, provenance={**second.provenance, "data": {**DATA, "temperature": 0.8}})
    assert collect.main(write_run(tmp_path / "data", Results(found.acceptance, (first, other)))) == 2
    assert (
        "eagle3-1-step: was trained on answers as eagle3 was; got other answers: {'temperature': 0.8"
        in capsys.readouterr().err
    )
    unmeasured = replace(first, draft="eagle1")
    assert collect.main(write_run(tmp_path / "measured", Results(found.acceptance, (unmeasured,)))) == 2
    assert "eagle1: its acceptance was measured; got no such draft" in capsys.readouterr().err
    with pytest.raises(DraftlineError, match=r"is the training.json of trainings"):
        load_results(tmp_path / "data/measured/acceptance.json")


def test_trends_find_the_line_that_points_lie_on() -> None:
    curve = [Point(10**step, 0.0, 0.0, (0.2 * step - 0.1,)) for step in (0, 3)]
    curve += [Point(tokens, 0.0, 0.0, (1.3 + (-1) ** tokens * 0.01,)) for tokens in (5000, 5001, 5002)]
    trend = fit_trend(curve)
    assert trend is not None
    assert (trend.first_tokens, trend.num_points) == (5000, 3)
    assert trend.largest_error == pytest.approx(0.0133, abs=1e-4)
    assert fit_trend(curve[:4]) is None


def test_the_table_of_trainings() -> None:
    _, _, *rows = fill("trainings")
    assert rows[0] == "| `eagle3` | 24.5 MB | 12,288 (97.0 %) | 150,000 | 400,000 (2.0 passes) | 2.0 | 3333 | 1.60 |"
    assert rows[2] == "| `medusa` | 24.5 MB | all | 150,000 | 400,000 (2.0 passes) | 2.0 | 3333 | 1.15 |"


def test_the_tables_of_acceptance() -> None:
    lines = fill("acceptance")
    assert lines[0] == "| MT-bench | `acceptance_length` | 1 | 2 | drafted a step |"
    assert lines[2] == "| `eagle3` | **1.60** | 0.40 | 0.20 | 2.0 |"
    assert lines[5] == "| `n-gram lookup` | **1.06** | 0.04 | 0.02 | 2.0 |"
    assert lines[7].startswith("| HumanEval |")
    assert fill("summary") == [
        "| `acceptance_length` | MT-bench | HumanEval |",
        "| --- | --- | --- |",
        "| `eagle3` | 1.60 | 1.60 |",
        "| `eagle3-1-step` | 1.30 | 1.30 |",
        "| `medusa` | 1.15 | 1.15 |",
        "| `n-gram lookup` | 1.06 | 1.06 |",
    ]


def test_the_ablation_compares_what_follows_a_right_draft() -> None:
    assert fill("ablation")[2:] == [
        "| MT-bench | 5 | 2 | 0.40 | 0.50 | 1.60 |",
        "| MT-bench | 1 | 2 | 0.20 | 0.50 | 1.30 |",
        "| HumanEval | 5 | 2 | 0.40 | 0.50 | 1.60 |",
        "| HumanEval | 1 | 2 | 0.20 | 0.50 | 1.30 |",
    ]
    found = make_results()
    assert fill("ablation", replace(found, trainings=found.trainings[:1])) == [NOT_MEASURED]


def test_more_tokens_follow_the_trend() -> None:
    lines = fill("more")
    assert lines[0].endswith("(bench/training.png)")
    cells = [cell.strip() for cell in lines[4].strip("|").split("|")]
    assert cells[:3] == ["`eagle3`", "1.60 after 400,000", "4 from 100,000 tokens on"]
    trend = fit_trend(make_results().trainings[0].curve)
    assert trend is not None
    assert cells[3:] == [f"{trend.per_tenfold:+.2f}", f"{trend.largest_error:.3f}", f"{trend.at(4e6):.2f}"]


def test_the_run_is_described() -> None:
    machine, data, measured, links = fill("run")
    assert machine == "- A processor, 2 cores; flags: avx2; draftline 0.1.0, torch 2.13.0"
    assert "1,000 answers or the first of them, 200,000 tokens with prompts, 150,000 of them drawn" in data
    assert measured.startswith("- measured on held-out prompts, 80 of MT-bench and 80 of HumanEval; greedy, int8")
    assert links == "- [all numbers](bench/training.json), [plot](bench/training.png)"


@pytest.mark.parametrize("name", BLOCKS)
def test_what_was_not_measured_is_said(name: str) -> None:
    assert NOT_MEASURED in fill_page(PAGE.format(name), None)
    assert fill(name, Results(replace(make_acceptance(), acceptances=()), ())) == [NOT_MEASURED]


def test_runs_are_published_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert collect.main(words := write_run(tmp_path, make_results())) == 0
    numbers, shown = tmp_path / "training.json", tmp_path / "page.md"
    monkeypatch.setattr(page, "NUMBERS", numbers)
    monkeypatch.setattr(page, "PAGES", (shown,))
    shown.write_text(PAGE.format("speed"))
    assert page.main([words[0]]) == 2
    assert "blocks are some of run, " in capsys.readouterr().err
    assert not numbers.exists()
    shown.write_text(PAGE.format("summary"))
    assert page.main([]) == 2
    assert page.main([words[0]]) == 0
    assert "| `eagle3` | 1.60 | 1.60 |" in shown.read_text()
    assert sorted(path.name for path in tmp_path.glob("training.*")) == ["training.json", "training.png"]
    shown.write_text(PAGE.format("summary"))
    assert page.main([]) == 0
    assert "| `eagle3` | 1.60 | 1.60 |" in shown.read_text()

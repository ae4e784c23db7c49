"""Acceptance on held-out prompts, through tiny engines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import ArtifactError, DraftlineError
from draftline.generation import load_engine
from draftline.speculation import TreeShape
from draftline.training.acceptance import NGRAM, Settings, main, measure_acceptance
from draftline.training.acceptance_report import load_report, write_report, write_table
from draftline.training.prompts.prompt import Prompt
from draftline.training.turns import Turns
from tests.laws.likely_models import write_likely_eagle3, write_likely_medusa, write_murmuring_target
from tests.sessions.tiny_engines import build_tiny_engine

AUTO = TreeShape("auto", 12, 4, 3)
TINY = Settings(num_prompts=5, max_tokens=24, max_depth=3)
QUESTIONS = [f"Question {number}: why are tables made of wood?" for number in range(9)]


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the held-out sets: the packages need not be installed, and questions are short."""
    prompts = [Prompt(f"mt-bench/{number}", text) for number, text in enumerate(QUESTIONS)]
    monkeypatch.setattr("draftline.training.acceptance.load_held_out", lambda name: prompts)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("acceptance")
    target = write_murmuring_target(root / "target", loudness=0.25)
    drafts: dict[str, Any] = {
        "eagle3": write_likely_eagle3(root / "eagle3", target),
        "medusa": write_likely_medusa(root / "medusa", target),
    }
    options = {"tree": AUTO, "max_num_tokens": 64, "max_batch_size": 8}
    built = {}
    for name, draft in [*drafts.items(), ("ngram", None), ("other", drafts["eagle3"])]:
        (root / f"build-{name}").mkdir()
        checkpoint = write_murmuring_target(root / "elsewhere", seed=9, loudness=0.25) if name == "other" else target
        method = "eagle3" if name == "other" else name
        built[name] = build_tiny_engine(root / f"build-{name}", checkpoint, drafts=[(method, draft)], **options)
    return built


def test_every_step_drafts_a_chain_whatever_the_engines_trees(engines: dict[str, Path]) -> None:
    lines: list[str] = []
    drafted = {name: engines[name] for name in ("eagle3", "medusa")}
    report = measure_acceptance(drafted, TINY, lines.append)
    found = {(entry.draft, entry.held_out): entry for entry in report.acceptances}
    assert list(found) == [(name, held_out) for name in ("eagle3", "medusa", NGRAM) for held_out in TINY.held_out]
    for entry in found.values():
        assert entry.num_prompts == 5
        assert len(entry.acceptance_rate_at) == 3
        assert sorted(entry.acceptance_rate_at, reverse=True) == list(entry.acceptance_rate_at)
        assert entry.acceptance_length == pytest.approx(1 + sum(entry.acceptance_rate_at))
        accepted = (entry.acceptance_length - 1) * entry.num_steps
        assert entry.acceptance_rate * entry.drafted_per_step * entry.num_steps == pytest.approx(accepted)
    assert 2.5 < found["eagle3", "mt-bench"].drafted_per_step <= 3.0
    assert 2.5 < found["medusa", "mt-bench"].drafted_per_step <= 3.0
    assert found["eagle3", "mt-bench"].acceptance_rate_at[0] > 0.1
    assert found["eagle3", "mt-bench"].num_tokens == found[NGRAM, "mt-bench"].num_tokens
    assert "eagle3: mt-bench 5/5 prompts" in lines
    table = write_table(report)
    assert len(re.findall(r"^  (eagle3|medusa|n-gram lookup) ", table, re.MULTILINE)) == 6


def test_a_draft_that_is_the_target_is_always_right(engines: dict[str, Path], tmp_path: Path) -> None:
    target = engines["eagle3"].parent.parent / "target"
    itself = build_tiny_engine(tmp_path, target, drafts=[("draft_model", target)], tree=AUTO, max_num_tokens=64)
    found = measure_acceptance({"itself": itself}, TINY, lambda line: None).acceptances[0]
    assert found.acceptance_rate == 1.0
    # 24 tokens: the prompt's own step gives one, five steps four each, the last step the three that are left.
    assert found.num_steps == 6 * 5
    assert found.acceptance_rate_at == (1.0, 1.0, pytest.approx(5 / 6))


def test_numbers_are_those_of_the_answers_themselves(engines: dict[str, Path]) -> None:
    report = measure_acceptance({"ngram": engines["ngram"]}, TINY, lambda line: None)
    assert {entry.draft for entry in report.acceptances} == {NGRAM}
    with load_engine(engines["ngram"]) as loaded:
        asked = [Turns(loaded.tokenizer).asking(QUESTIONS[place]) for place in (0, 1, 3, 5, 7)]
        answers = loaded.generate(asked, TINY.max_tokens, speculate=False)
    assert report.acceptances[0].num_tokens == sum(len(answer.token_ids) for answer in answers)


def test_fewer_heads_than_depths_draft_as_deep_as_they_can(engines: dict[str, Path], tmp_path: Path) -> None:
    target = engines["eagle3"].parent.parent / "target"
    heads = write_likely_medusa(tmp_path / "heads", target, num_heads=2)
    options = {"tree": TreeShape("auto", 12, 2, 3), "max_num_tokens": 64, "max_batch_size": 8}
    (tmp_path / "build").mkdir()
    medusa = build_tiny_engine(tmp_path / "build", target, drafts=[("medusa", heads)], **options)
    report = measure_acceptance({"medusa": medusa, "eagle3": engines["eagle3"]}, TINY, lambda line: None)
    first, second, ngram = (report.acceptances[place] for place in (0, 2, 4))
    assert (first.draft, first.acceptance_rate_at[2]) == ("medusa", 0.0)
    assert first.drafted_per_step <= 2.0 < second.drafted_per_step
    assert (ngram.draft, len(ngram.acceptance_rate_at)) == (NGRAM, 3)


def test_unlike_targets_are_refused(engines: dict[str, Path]) -> None:
    with pytest.raises(DraftlineError, match="other: answers as eagle3 does; got another answer to mt-bench/0"):
        measure_acceptance({name: engines[name] for name in ("eagle3", "other")}, TINY, lambda line: None)


def test_unsuitable_engines_are_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DraftlineError, match="num_prompts: is at least 1; got 0"):
        Settings(num_prompts=0)
    with pytest.raises(DraftlineError, match=r"drafts 6 tokens deep; got tree.max_depth 4; build it with tree.max_dep"):
        measure_acceptance({"eagle3": engines["eagle3"]}, Settings(max_depth=6), lambda line: None)
    target = write_murmuring_target(tmp_path / "target")
    plain = build_tiny_engine(tmp_path, target)
    with pytest.raises(DraftlineError, match="has one draft; got none; measure a pipeline with one `draft`"):
        measure_acceptance({"plain": plain}, TINY, lambda line: None)


def test_a_pool_too_small_for_whole_chains_is_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    target = engines["eagle3"].parent.parent / "target"
    head = engines["eagle3"].parent.parent / "eagle3"
    small = build_tiny_engine(
        tmp_path, target, drafts=[("eagle3", head)], tree=AUTO, max_num_tokens=64, max_blocks=9, max_seq_len=144
    )
    with pytest.raises(DraftlineError, match=r"small: drafts 3 tokens in every step and verifies them; got \d+ of"):
        measure_acceptance({"small": small}, TINY, lambda line: None)


def test_the_command_writes_what_it_measured(
    engines: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "engine").symlink_to(engines["eagle3"])
    monkeypatch.setattr("draftline.training.acceptance.Settings", lambda *values: Settings(*values, max_depth=4))
    arguments = [str(tmp_path / "mine"), "--output", str(tmp_path / "out"), "--prompts", "2", "--tokens", "12"]
    assert main([*arguments, "--held-out", "mt-bench"]) == 0
    assert "mt-bench: 2 prompts" in capsys.readouterr().out
    report = load_report(tmp_path / "out" / "acceptance.json")
    assert [entry.draft for entry in report.acceptances] == ["mine", NGRAM]
    assert report.settings["max_tokens"] == 12
    assert (tmp_path / "out" / "acceptance.png").stat().st_size > 1000
    again = tmp_path / "again"
    write_report(report, again)
    assert json.loads((again / "acceptance.json").read_text()) == json.loads(
        (tmp_path / "out" / "acceptance.json").read_text()
    )
    assert main([str(tmp_path / "mine"), str(tmp_path / "mine"), "--output", str(tmp_path / "out")]) == 2
    assert "build directories have names of their own; got mine, mine" in capsys.readouterr().err


def test_no_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"acceptance.json: is a report of acceptance; got FileNotFoundError"):
        load_report(tmp_path / "acceptance.json")

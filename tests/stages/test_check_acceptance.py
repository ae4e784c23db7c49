"""What the check stage makes of rates of acceptance; ``tests/end_to_end`` measures real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import load_head_config
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Pipeline
from draftline.errors import CheckpointError
from draftline.sessions.draft_builder import DraftSource, describe_drafts
from draftline.speculation import TreeShape
from draftline.stages import check_acceptance as module
from draftline.stages.acceptance import Proposals
from draftline.stages.check_acceptance import AcceptanceReport, Measured, check_acceptance
from draftline.stages.draft_probe import probe_draft
from draftline.stages.drafts import CAPTURED_LAYERS_FILE, draft_sources
from draftline.stages.runner import run_pipeline
from draftline.stages.stage import StageCall
from tests.sessions.tiny_engines import convert_tiny_draft
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_layout_writers import IDS
from tests.tiny_layouts import NUM_LAYERS, ROWS

Rate = Callable[[HeadConfig], float]
POSITIONS = np.arange(1000)
CHOICES = POSITIONS % 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and heads, published and converted."""
    root = tmp_path_factory.mktemp("acceptance")
    target_dir = write_tiny_checkpoint(root / "model", num_layers=NUM_LAYERS)
    for name in ("speculators", "modelopt", "specforge"):
        ROWS[name].write(root / name, target_dir)
    wanted = pipeline("specforge")
    run_pipeline(wanted, root / "build", root=root, until="convert")
    return root


def pipeline(name: str, **check: str) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model"},
            "draft": {"method": "eagle3", "checkpoint": name},
            "engine": {"max_seq_len": 128},
            "kv_cache": {"max_blocks": 32},
            "check": {"perplexity": "never", **check},
        }
    )


def proposals(rate: float) -> Proposals:
    """Accepted at a share of the positions that grows with the rate, with probability 0.5; elsewhere another token."""
    is_accepted = 1000 * rate > POSITIONS * 7 % 1000
    return Proposals(CHOICES, np.where(is_accepted, CHOICES, (CHOICES + 7) % 20), np.where(is_accepted, 0.5, 0.0))


def check(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, rate: Rate, of_text: float = 0.4, **settings: str
) -> tuple[AcceptanceReport | None, list[str]]:
    def probe(*arguments: object, head: HeadConfig, **options: object) -> tuple[Proposals, Proposals]:
        return proposals(rate(head)), proposals(of_text)

    monkeypatch.setattr(module, "probe_draft", probe)
    checkpoint, said = root / "build" / "checkpoint", list[str]()
    folder = convert_tiny_draft(root, "eagle3", root / name, checkpoint, "float32")
    wanted = pipeline(name, **settings)
    call = StageCall(wanted, root, (root / name,), root, root, lambda done, total: None, said.append)
    target = load_checkpoint_config(checkpoint)
    return check_acceptance(call, 0, checkpoint, folder, target, load_tokenizer(checkpoint), 128), said


def by_layers(rates: Mapping[tuple[int, ...], float], other: float = 0.05) -> Rate:
    return lambda head: rates.get(head.captured_layers, other)


def test_the_reading_that_is_accepted_most_often_is_chosen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, said = check(root, monkeypatch, "speculators", by_layers({(1, 3, 4): 0.2, (2, 4, 5): 0.31}))
    assert report is not None
    assert (report.captured_layers, report.measured) == ((2, 4, 5), Measured(0.31, 0.155))
    assert said == [
        "captured layers [2, 4, 5], better than what stands first; accepted at depth 1: "
        "[1, 3, 4] 20.0% (probability 0.100), [2, 4, 5] 31.0% (probability 0.155), [0, 2, 3] 5.0% (probability 0.025)",
        "eagle3: 31.0% of 1000 tokens accepted at depth 1",
    ]


def test_the_first_reading_stays_where_none_is_better(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, said = check(root, monkeypatch, "speculators", by_layers({(1, 3, 4): 0.3}, other=0.305))
    assert report is not None
    assert report.captured_layers == (1, 3, 4)
    assert said[0].startswith("captured layers [1, 3, 4], none is better; accepted at depth 1: ")


def test_default_layers_that_are_accepted_more_often_are_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = r"got 30\.0% .* at depth 1, and 45\.0% .* with layers \[1, 3, 4\]; write layers \[1, 3, 4\] into"
    rule = f"no other layers .*; {got}"
    with pytest.raises(CheckpointError, match=rule):
        check(root, monkeypatch, "specforge", by_layers({(0, 1, 3): 0.3, (1, 3, 4): 0.45}))
    report, _ = check(root, monkeypatch, "specforge", by_layers({(0, 1, 3): 0.3, (1, 3, 4): 0.3}))
    assert report is not None
    assert (report.captured_layers, report.others) == ((0, 1, 3), {"layers [1, 3, 4]": Measured(0.3, 0.15)})


def test_the_targets_rotary_settings_are_tried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = r"no other rope_theta .*; got 20\.0% .* at depth 1, and 30\.0% .* with rope_theta 10000; write"
    with pytest.raises(CheckpointError, match=rule):
        check(root, monkeypatch, "modelopt", lambda head: 0.2 if head.rotary_scaling else 0.3)


def test_acceptance_near_chance_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = r"^specforge: a draft is accepted more often than by chance \(5\.0% at depth 1\); got 6\.0% of 1000 tokens"
    with pytest.raises(CheckpointError, match=rule):
        check(root, monkeypatch, "specforge", lambda head: 0.06)


def test_a_target_that_guesses_nothing_judges_no_draft(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, said = check(root, monkeypatch, "speculators", lambda head: 0.05, of_text=0.05)
    assert report is not None
    assert not report.is_judged
    assert said == ["eagle3: acceptance says nothing, the target itself guesses no token of the text"]


@pytest.mark.parametrize(("wanted", "num_parameters"), [("never", 0), ("auto", 2 * 10**9), ("always", 2 * 10**9)])
def test_what_is_not_measured_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, num_parameters: int
) -> None:
    monkeypatch.setattr(module, "count_parameters", lambda target: num_parameters)
    report, said = check(root, monkeypatch, "speculators", lambda head: 0.3, acceptance=wanted)
    assert (report is not None) == (wanted == "always")
    layers = "eagle3: layers [1, 3, 4] are not measured; they may mean [2, 4, 5] or [0, 2, 3]"
    size = "acceptance is not measured unasked of 2.0 billion parameters; check.acceptance=always asks for it"
    assert {"never": [layers], "auto": [size, layers]}.get(wanted, said) == said


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "medusa"])
def test_a_probe_proposes_what_the_draft_itself_does(root: Path, tmp_path: Path, method: str) -> None:
    """A draft model that is the target is accepted everywhere; proposals stand behind the tokens they follow."""
    passages = [list(range(5, 40)), list(range(60, 90))]
    checkpoint = root / "build" / "checkpoint"
    if method == "draft_model":
        folder = checkpoint
    else:
        row = ROWS["specforge" if method == "eagle3" else "medusa-v1"]
        folder = convert_tiny_draft(
            tmp_path, row.method, row.write(tmp_path / "s", root / "model"), checkpoint, "float32"
        )
    source = DraftSource(method, folder, "float32")  # type: ignore[arg-type]
    head = None if method == "draft_model" else load_head_config(folder)
    found, of_text = probe_draft(checkpoint, source, passages, tmp_path, head=head, num_threads=1)
    assert len(of_text.choices) == sum(len(ids) - 1 for ids in passages)
    assert of_text.proposed.tolist() == passages[0][1:] + passages[1][1:]
    assert len(found.choices) == sum(len(ids) - (method != "draft_model") for ids in passages)
    if method == "draft_model":
        assert found.acceptance_rate == 1.0
    else:
        assert found.choices.tolist() == of_text_choices(checkpoint, passages, tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tmp")] == []


def of_text_choices(checkpoint: Path, passages: list[list[int]], scratch: Path) -> list[int]:
    """The target's choices behind all tokens but the first, by the probe of a draft model that is the target."""
    own, _ = probe_draft(checkpoint, DraftSource("draft_model", checkpoint), passages, scratch, num_threads=1)
    choices = own.choices.tolist()
    return choices[1 : len(passages[0])] + choices[len(passages[0]) + 1 :]


def test_what_check_chose_is_what_is_built(root: Path, tmp_path: Path) -> None:
    chosen = tmp_path / CAPTURED_LAYERS_FILE
    chosen.write_text(json.dumps({"0": [0, 2, 3]}))
    sources = draft_sources(pipeline("specforge"), root / "build", chosen)
    assert sources[0].captured_layers == (0, 2, 3)
    assert draft_sources(pipeline("specforge"), root / "build")[0].captured_layers == ()
    target = load_checkpoint_config(root / "build" / "checkpoint")
    tree = TreeShape("chain", 2, 1, 1)
    (described,) = describe_drafts(target, sources, tree, "float32", "onnxruntime", 128)
    assert described.head is not None
    assert described.head.captured_layers == (0, 2, 3)


def test_a_new_choice_builds_a_new_engine_and_a_new_report_does_not(root: Path, tmp_path: Path) -> None:
    def ran(until: str = "build", **check: str) -> list[str]:
        reports = run_pipeline(pipeline("speculators", **check), tmp_path / "build", root=root, until=until)
        return [report.stage for report in reports if report.reason is not None]

    assert ran() == ["convert", "check", "build"]
    report: dict[str, Any] = json.loads((tmp_path / "build" / "check" / "report.json").read_text())
    assert report["drafts"][0]["acceptance"]["captured_layers"] == [1, 3, 4]
    assert not report["drafts"][0]["acceptance"]["is_judged"]
    assert json.loads((tmp_path / "build" / "check" / CAPTURED_LAYERS_FILE).read_text()) == {"0": [1, 3, 4]}
    assert ran(perplexity="auto") == ["check"]
    assert ran(acceptance="never", perplexity="auto") == ["check", "build"], "nothing was chosen any more"
    assert IDS not in json.dumps(report)

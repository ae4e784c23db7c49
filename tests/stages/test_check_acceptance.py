"""What the check stage makes of rates of acceptance; ``tests/end_to_end`` measures real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Pipeline
from draftline.errors import CheckpointError
from draftline.sessions.draft_builder import describe_drafts
from draftline.speculation import TreeShape
from draftline.stages import check_acceptance as module
from draftline.stages.acceptance import Proposals
from draftline.stages.check_acceptance import AcceptanceReport, Measured, check_acceptance
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
    """Accepted at a share of the positions that grows with the rate, with overlap 0.5; elsewhere another token."""
    is_accepted = 1000 * rate > POSITIONS * 617 % 1000
    proposed = np.where(is_accepted, CHOICES, (CHOICES + 7) % 20)
    return Proposals(CHOICES, proposed, np.where(is_accepted, 0.5, 0.0), (600, 400))


class Probe:
    """Stands in the place of a ``DraftProbe``; ``gone_on`` is how far its answers were drawn."""

    def __init__(self, rate: Rate, of_text: float) -> None:
        self.rate, self.of_text, self.gone_on = rate, of_text, list[int]()

    def go_on(self, num_tokens: int) -> None:
        self.gone_on.append(num_tokens)

    def guesses(self) -> Proposals:
        return proposals(self.of_text)

    def measure(self, head: HeadConfig, *, has_ids: bool = False) -> Proposals:
        return proposals(0.05 if has_ids else self.rate(head))


def check(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, rate: Rate, of_text: float = 0.4, **settings: str
) -> tuple[AcceptanceReport | None, list[str]]:
    probe = Probe(rate, of_text)
    return check_with(probe, root, monkeypatch, name, **settings)


def check_with(
    probe: Probe, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, **settings: str
) -> tuple[AcceptanceReport | None, list[str]]:
    @contextmanager
    def opened(*arguments: object, **options: object) -> Iterator[Probe]:
        yield probe

    monkeypatch.setattr(module, "open_probe", opened)
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
    assert said[:2] == [
        "captured layers [2, 4, 5], better than what stands first; accepted at depth 1: "
        "first 20.0% (overlap 0.100), [2, 4, 5] 31.0% (overlap 0.155), [0, 2, 3] 5.0% (overlap 0.025)",
        "eagle3: 31.0% of 1000 tokens accepted at depth 1",
    ]


def test_the_first_reading_stays_where_none_is_better(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, said = check(root, monkeypatch, "speculators", by_layers({(1, 3, 4): 0.3}, other=0.305))
    assert report is not None
    assert report.captured_layers == (1, 3, 4)
    assert said[0].startswith("captured layers [1, 3, 4], none is better; accepted at depth 1: ")


def test_default_layers_that_are_accepted_more_often_are_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = r"got 30\.0% .* at depth 1, and 45\.0% .* with layers \[1, 3, 4\], \d+\.\d standard errors more"
    rule = rf"no other layers .*; {got}; set draft\.captured_layers to \[1, 3, 4\], or"
    with pytest.raises(CheckpointError, match=rule):
        check(root, monkeypatch, "specforge", by_layers({(0, 1, 3): 0.3, (1, 3, 4): 0.45}))


def test_neighbours_and_common_bases_are_tried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head names (0, 1, 3); it and the target have a base of 10000. There is no layer before 0."""
    report, said = check(root, monkeypatch, "specforge", lambda head: 0.3)
    assert report is not None
    assert report.captured_layers == (0, 1, 3)
    assert list(report.others) == [
        "layers [1, 3, 4]",
        "layers [1, 2, 4]",
        "rope_theta 500000",
        "rope_theta 1e+06",
    ]
    assert set(report.others.values()) == {Measured(0.3, 0.15)}
    assert [line.split(" with ")[1] for line in said[1:]] == [f"{name}, +0.0 standard errors" for name in report.others]


def test_of_several_that_are_better_the_best_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_base = {500000.0: 0.4, 1000000.0: 0.45}
    rule = r"no other rope_theta .* and 45\.0% .* with rope_theta 1e\+06, .*; write rope_theta 1e\+06 into its config"
    with pytest.raises(CheckpointError, match=rule):
        check(root, monkeypatch, "specforge", lambda head: by_base.get(head.rotary_base, 0.3))


def test_answers_go_on_while_a_challenger_may_be_better(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(rate: Rate) -> list[int]:
        probe = Probe(rate, 0.4)
        check_with(probe, root, monkeypatch, "specforge")
        return probe.gone_on

    assert drawn(lambda head: 0.3) == [80]
    assert drawn(by_layers({(0, 1, 3): 0.3}, other=0.303)) == [80, 160, 240]


def test_the_targets_rotary_settings_are_tried(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = r"no other rope_theta .*; got 20\.0% .* at depth 1, and 30\.0% .* with rope_theta 10000, .*; write"
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
    assert said == ["eagle3: acceptance says nothing, the target itself guesses no token of a text"]


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

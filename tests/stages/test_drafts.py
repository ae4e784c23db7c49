"""The stages with drafts, on tiny checkpoints: what they write, refuse, and run again."""

from __future__ import annotations

import doctest
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import draftline.checkpoints.known_positions
from draftline.choices import NAMED_CHOICES
from draftline.config import Pipeline, load_pipeline
from draftline.errors import CheckpointError
from draftline.generation import load_engine
from draftline.manifest import load_manifest
from draftline.runtime.request import SamplingParameters
from draftline.sessions.engine_config import load_engine_config
from draftline.speculation import Acceptance, TreeShape
from draftline.stages import convert
from draftline.stages.check_drafts import check_depth
from draftline.stages.drafts import acceptance, tree_shape
from draftline.stages.progress import Progress
from draftline.stages.runner import StageReport, run_pipeline
from draftline.stages.stage import StageCall
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa
from tests.tiny_layouts import ROWS

DRAFTS = ("draft_model", "eagle1", "eagle3", "medusa")


def pipeline(*methods: str, max_seq_len: int = 256, **blocks: Any) -> Pipeline:
    drafts = [{"method": method} | ({} if method == "ngram" else {"checkpoint": method}) for method in methods]
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model"},
            "draft": drafts or None,
            "engine": {"max_seq_len": max_seq_len},
            "kv_cache": {"max_blocks": 64},
            **({"tree": {"max_depth": 3}} if drafts else {}),
            **blocks,
        }
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    model = write_tiny_checkpoint(root / "model", num_layers=3)
    write_tiny_checkpoint(root / "draft_model", num_layers=1, seed=1, max_position_embeddings=128)
    write_tiny_eagle1(root / "eagle1", model)
    write_tiny_eagle3(root / "eagle3", model, captured_layers=(0, 1, 2))
    write_tiny_medusa(root / "medusa", model, num_heads=3)
    return root


def run(root: Path, build: Path, wanted: Pipeline, until: str = "build") -> list[StageReport]:
    return run_pipeline(wanted, build, root=root, until=until)


def answers(build: Path) -> tuple[list[tuple[int, ...]], int]:
    """Ask two greedy and two random requests at once; return their tokens, and how many were drafted for them."""
    samplings = [SamplingParameters(), SamplingParameters(temperature=0.7, seed=5)] * 2
    prompts = ["hello in the an hello in", [7, 8, 9] * 4] * 2
    with load_engine(build / "engine") as loaded:
        found = loaded.generate(prompts, 40, samplings)
    numbers = [answer.metrics.speculation.num_drafted_tokens for answer in found]
    return [answer.token_ids for answer in found], sum(numbers)


@pytest.fixture(scope="module")
def plain_answers(root: Path) -> list[tuple[int, ...]]:
    run(root, root / "plain", pipeline())
    tokens, num_drafted = answers(root / "plain")
    assert num_drafted == 0
    return tokens


def ran(reports: list[StageReport]) -> dict[str, str]:
    return {report.stage: report.reason for report in reports if report.reason is not None}


def test_all_drafts_of_a_list_are_built(root: Path, tmp_path: Path) -> None:
    wanted = pipeline("ngram", *DRAFTS, acceptance={"rule": "typical"})
    run(root, tmp_path / "build", wanted)
    config = load_engine_config(tmp_path / "build" / "engine")
    assert [draft.method for draft in config.drafts] == ["ngram", *DRAFTS]
    assert config.tree == TreeShape("auto", 16, 3, 4)
    assert config.acceptance == Acceptance("typical", 0.09, 0.3)
    folders = sorted(path.name for path in (tmp_path / "build" / "checkpoint").iterdir() if path.is_dir())
    assert folders == ["draft-1", "draft-2", "draft-3", "draft-4"]
    report = json.loads((tmp_path / "build" / "check" / "report.json").read_text())
    assert [(draft["method"], draft["max_position_embeddings"]) for draft in report["drafts"]] == [
        ("ngram", None),
        ("draft_model", 128),
        ("eagle1", 512),
        ("eagle3", 512),
        ("medusa", None),
    ]
    assert [draft["drafts_to_the_end"] for draft in report["drafts"]] == [True, False, True, True, True]
    measured = [draft["acceptance"] and draft["acceptance"]["is_judged"] for draft in report["drafts"]]
    assert measured == [None, False, False, False, False], "random weights guess nothing"
    manifest = load_manifest(tmp_path / "build" / "checkpoint")
    assert manifest is not None
    assert manifest.result["draft_layers"] == [0, 1, 1, 1, 1]
    assert {"file config.json", "file draft.1/config.json", "file draft.4/config.json"} <= set(manifest.inputs)


@pytest.mark.parametrize(
    "methods", [("ngram",), ("eagle3", "ngram"), ("draft_model",), ("eagle1", "medusa")], ids="+".join
)
def test_an_engine_with_drafts_answers_as_one_without(
    root: Path, tmp_path: Path, plain_answers: list[tuple[int, ...]], methods: tuple[str, ...]
) -> None:
    run(root, tmp_path / "build", pipeline(*methods, tree={"kind": "dynamic", "max_depth": 3}))
    tokens, num_drafted = answers(tmp_path / "build")
    assert tokens == plain_answers
    assert num_drafted > 0


def test_a_change_runs_what_depends_on_it(root: Path, tmp_path: Path) -> None:
    for name in ("model", "eagle1"):
        shutil.copytree(root / name, tmp_path / name)
    build = tmp_path / "build"
    assert list(ran(run(tmp_path, build, pipeline("eagle1")))) == ["convert", "check", "build"]
    assert ran(run(tmp_path, build, pipeline("eagle1"))) == {}
    assert ran(run(tmp_path, build, pipeline("eagle1", tree={"max_depth": 3, "top_k": 2}))) == {
        "build": "setting tree.top_k changed from 4 to 2"
    }
    assert list(ran(run(tmp_path, build, pipeline("eagle1", acceptance={"rule": "typical"})))) == ["build"]
    run(tmp_path, build, pipeline("eagle1"))
    (tmp_path / "eagle1").rename(tmp_path / "eagle2")
    assert ran(run(tmp_path, build, pipeline("eagle2"))) == {
        "convert": 'setting draft.method changed from ["eagle1"] to ["eagle2"]',
        "check": 'setting draft.method changed from ["eagle1"] to ["eagle2"]',
        "build": 'setting draft.method changed from ["eagle1"] to ["eagle2"]',
    }
    config = tmp_path / "eagle2" / "config.json"
    config.write_text(config.read_text() + "\n")
    reports = ran(run(tmp_path, build, pipeline("eagle2")))
    assert reports == {"convert": "file draft.0/config.json changed"}, "its output is the same"
    assert set(ran(run(tmp_path, build, pipeline()))) == {"convert", "check", "build"}
    assert not (build / "checkpoint" / "draft-0").exists()


def test_a_moved_draft_is_the_same_draft(root: Path, tmp_path: Path) -> None:
    for name in ("model", "medusa"):
        shutil.copytree(root / name, tmp_path / name)
    run(tmp_path, tmp_path / "build", pipeline("medusa"), until="check")
    (tmp_path / "medusa").rename(tmp_path / "elsewhere")
    moved = pipeline(draft={"method": "medusa", "checkpoint": "elsewhere"}, tree={"max_depth": 3})
    assert ran(run(tmp_path, tmp_path / "build", moved, until="check")) == {}


def test_a_reproduction_names_the_drafts(root: Path, tmp_path: Path) -> None:
    run(root, tmp_path / "build", pipeline("ngram", "medusa"), until="convert")
    text = (tmp_path / "build" / "checkpoint" / "pipeline.yaml").read_text()
    assert f"- method: medusa\n  checkpoint: {(root / 'medusa').resolve()}\n" in text
    assert "- method: ngram\n- method" in text


def test_a_draft_that_is_not_there(root: Path, tmp_path: Path) -> None:
    wanted = pipeline("ngram", "eagle1", "eagle2")
    with pytest.raises(CheckpointError, match=r"^eagle2: the checkpoint exists; got nothing at .*/eagle2; correct the"):
        run(root, tmp_path / "build", wanted)
    assert not (tmp_path / "build").exists()


def test_a_tree_deeper_than_the_heads_is_refused(root: Path, tmp_path: Path) -> None:
    error = r"tree\.max_depth: the heads draft 3 tokens, one each; got 4; set tree\.max_depth to 3"
    with pytest.raises(CheckpointError, match=error):
        run(root, tmp_path / "build", pipeline("medusa", tree={"max_depth": 4}))
    assert run(root, tmp_path / "build", pipeline("medusa", "ngram", tree={"max_depth": 4}), until="check")


def test_positions_a_draft_knows() -> None:
    assert doctest.testmod(draftline.checkpoints.known_positions).failed == 0


def test_depths() -> None:
    check_depth([None, 2], 5)
    check_depth([3], 3)
    with pytest.raises(CheckpointError, match="got 4"):
        check_depth([3], 4)


def test_a_draft_model_speaks_the_targets_vocabulary(root: Path, tmp_path: Path) -> None:
    for name in ("model", "draft_model"):
        shutil.copytree(root / name, tmp_path / name)
    path = tmp_path / "draft_model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"the draft's tokenizer gives 'a' the id "):
        run(tmp_path, tmp_path / "build", pipeline("draft_model"))


@pytest.mark.parametrize(
    ("tree", "shape"),
    [
        ({}, TreeShape("auto", 16, 5, 4)),
        ({"kind": "dynamic", "top_k": 8}, TreeShape("dynamic", 16, 5, 8)),
        ({"kind": "chain", "max_depth": 3}, TreeShape("chain", 4, 3, 1)),
        ({"kind": "static", "choices": [[0], [0, 2]]}, TreeShape("static", 3, 2, 3, ((0,), (0, 2)))),
        ({"kind": "static", "choices": "eagle_26"}, TreeShape("static", 26, 5, 4, NAMED_CHOICES["eagle_26"])),
    ],
)
def test_the_shape_of_trees(tree: dict[str, Any], shape: TreeShape) -> None:
    assert tree_shape(pipeline("ngram", "medusa", tree=tree)) == shape


def test_plain_decoding_has_no_tree() -> None:
    assert tree_shape(pipeline()) is None
    assert acceptance(pipeline()) == acceptance(pipeline("ngram")) == Acceptance()


def test_a_reproduction_makes_the_same_drafts(root: Path, tmp_path: Path) -> None:
    run(root, tmp_path / "build", pipeline("eagle3", "draft_model"))
    again = load_pipeline(tmp_path / "build" / "engine" / "pipeline.yaml")
    run(tmp_path, tmp_path / "again", again)
    for folder in ("checkpoint", "check", "engine"):
        first, second = (load_manifest(tmp_path / build / folder) for build in ("build", "again"))
        assert first is not None
        assert second is not None
        assert first.outputs_sha256() == second.outputs_sha256()


def test_progress_goes_from_the_target_through_the_drafts(root: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    sources = (None, root / "eagle1", root / "medusa")
    wanted = pipeline("ngram", "eagle1", "medusa")
    call = StageCall(
        wanted, root / "model", sources, tmp_path, tmp_path, lambda *counts: done.append(counts), lambda line: None
    )
    convert.run(call)
    assert done == sorted(done)
    assert len({total for _, total in done}) == 1
    assert done[-1][0] == done[-1][1]


def test_a_dry_run_tells_a_changed_draft(root: Path, tmp_path: Path) -> None:
    for name in ("model", "medusa"):
        shutil.copytree(root / name, tmp_path / name)
    build = tmp_path / "build"
    run(tmp_path, build, pipeline("medusa"), until="check")
    config = tmp_path / "medusa" / "config.json"
    config.write_text(config.read_text() + "\n")
    reports = run_pipeline(pipeline("medusa"), build, root=tmp_path, until="check", dry_run=True)
    assert ran(reports)["convert"] == "file draft.0/config.json changed"


def test_a_model_with_heads_inside_is_target_and_draft(root: Path, tmp_path: Path) -> None:
    """Medusa-2: one folder. Without a draft that reads them, the run says that its heads are left out."""
    ROWS["medusa-2"].write(tmp_path / "model", root / "model")
    stream = io.StringIO()
    run_pipeline(pipeline(), tmp_path / "plain", root=tmp_path, until="convert", progress=Progress(stream))
    assert "convert: the target holds Medusa heads, which are left out" in stream.getvalue()
    wanted = pipeline(draft={"method": "medusa", "checkpoint": "model"}, tree={"max_depth": 3})
    stream = io.StringIO()
    run_pipeline(wanted, tmp_path / "build", root=tmp_path, until="build", progress=Progress(stream))
    assert "convert: medusa: Medusa-2: 3 heads, residual blocks of each: 1" in stream.getvalue()
    tokens, num_drafted = answers(tmp_path / "build")
    assert num_drafted > 0
    run(tmp_path, tmp_path / "plain", pipeline())
    assert answers(tmp_path / "plain") == (tokens, 0)


def test_convert_says_what_is_borrowed_and_where_the_target_differs(root: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    wanted = pipeline("eagle1", "draft_model")
    run_pipeline(wanted, tmp_path / "build", root=root, until="convert", progress=Progress(stream))
    said = stream.getvalue()
    assert "convert: eagle1: borrows the target's lm_head [320, 64]\n" in said
    assert "convert: draft_model: knows 128 positions where the target knows 512: behind them it is not asked\n" in said


def test_a_tokenizer_beside_a_head_is_the_targets(root: Path, tmp_path: Path) -> None:
    for name in ("model", "eagle1"):
        shutil.copytree(root / name, tmp_path / name)
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "eagle1" / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"the draft's tokenizer gives 'a' the id "):
        run(tmp_path, tmp_path / "build", pipeline("eagle1"), until="convert")

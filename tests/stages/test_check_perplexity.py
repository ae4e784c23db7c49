"""The check stage's measurement, with real engines of tiny checkpoints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.config import Pipeline
from draftline.errors import CheckpointError
from draftline.stages import check_perplexity
from draftline.stages.check_perplexity import CHUNK_TOKENS, run_passage
from draftline.stages.perplexity_text import PASSAGES
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session
from tests.tiny_checkpoints import random_tensors, write_tiny_checkpoint, write_weights


def pipeline(engine: dict[str, Any] | None = None, kv_cache: dict[str, Any] | None = None, **check: str) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model"},
            "engine": {"max_seq_len": 300, "num_threads": 1, **(engine or {})},
            "kv_cache": {"max_blocks": 64, **(kv_cache or {})},
            "check": check,
        }
    )


def check(root: Path, wanted: Pipeline) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the report's perplexity, and the lines that the run said in between."""
    stream = io.StringIO()
    run_pipeline(wanted, root / "build", root=root, until="check", progress=Progress(stream))
    report = json.loads((root / "build" / "check" / "report.json").read_text())
    lines = stream.getvalue().splitlines()
    said = [line for line in lines if line.startswith("check: ")][1:-1]
    return report["perplexity"], said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tiny_checkpoint(tmp_path / "model")
    return tmp_path


def test_chunks_and_the_pool_change_nothing(root: Path) -> None:
    session = open_tiny_session(build_tiny_engine(root, root / "model"))
    ids = np.random.default_rng(0).integers(3, 259, size=CHUNK_TOKENS + 21).tolist()
    logits = np.concatenate(list(run_passage(session, ids, 16)))
    whole = session.forward_logits(make_batch([Text([])], [ids[:-1]]))
    np.testing.assert_array_equal(logits, whole)
    session.close()


def test_an_engine_in_float32_is_measured_alone(root: Path) -> None:
    report, said = check(root, pipeline())
    assert report is not None
    tokenizer = load_tokenizer(root / "build" / "checkpoint")
    assert report["num_tokens"] == sum(min(len(tokenizer.encode(passage)), 300) - 1 for passage in PASSAGES)
    assert report["nll"] > 1
    assert report["perplexity"] == pytest.approx(np.exp(report["nll"]), rel=1e-3)
    assert report["float32"] is None
    assert said[0] == f"check: perplexity {report['perplexity']:.4g} in float32"
    assert said[1].startswith("check: so high a perplexity is that of damaged weights"), "the weights are random"
    assert {path.name for path in (root / "build" / "check").iterdir()} == {
        "captured_layers.json",
        "report.json",
        "manifest.json",
        "pipeline.yaml",
        "reproduce.sh",
    }


def test_what_is_rounded_is_compared_with_float32(root: Path) -> None:
    alone, _ = check(root, pipeline())
    found = {}
    for name, wanted in (
        ("int8", pipeline({"weights_dtype": "int8"})),
        ("int4", pipeline({"weights_dtype": "int4"})),
        ("float32 with a float16 pool", pipeline(kv_cache={"dtype": "float16"})),
    ):
        report, said = check(root, wanted)
        assert report is not None
        assert alone is not None
        assert report["float32"]["nll"] == alone["nll"]
        assert said[0].startswith(f"check: perplexity {report['perplexity']:.4g} in {name}, ")
        found[name] = report["float32"]["kl_divergence"], report["float32"]["same_greedy_tokens"]
    int8, int4, half_pool = found.values()
    assert 0 < int8[0] < int4[0]
    assert 1 >= int8[1] > int4[1] > 0.5
    assert 0 <= half_pool[0] < int8[0]
    assert half_pool[1] >= int8[1]


def test_other_weights_are_checked_again_and_ports_are_not(root: Path) -> None:
    check(root, pipeline())
    again = run_pipeline(pipeline({"weights_dtype": "int8"}), root / "build", root=root, until="check")
    assert again[1].reason == 'setting engine.weights_dtype changed from "float32" to "int8"'
    other_ports = pipeline({"weights_dtype": "int8"}).model_copy(update={"serve": pipeline().serve})
    assert run_pipeline(other_ports, root / "build", root=root, until="check")[1].reason is None


def test_large_models_are_measured_when_asked_to(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_perplexity, "MAX_PARAMETERS", 1000)
    report, said = check(root, pipeline())
    assert report is None
    assert said == [
        "check: perplexity is not measured unasked of 0.0 billion parameters; check.perplexity=always asks for it"
    ]
    report, _ = check(root, pipeline(perplexity="always"))
    assert report is not None
    report, said = check(root, pipeline(perplexity="never"))
    assert report is None
    assert said == []


@pytest.mark.parametrize(
    ("name", "factor", "engine", "pool_dtype", "error"),
    [
        ("model.norm.weight", 1e38, {"weights_dtype": "int8"}, "float32", "in float32; got .*; fetch or"),
        (
            "model.layers.0.self_attn.v_proj.weight",
            1e6,
            {"weights_dtype": "float32"},
            "float16",
            "in float32 with a float16 pool; got .*; set kv_cache.dtype to float32, or fetch or",
        ),
        (
            "model.layers.0.mlp.down_proj.weight",
            1e38,
            {"weights_dtype": "int8", "kernels": "onnxruntime"},
            "float32",
            "in int8; got .*; set engine.weights_dtype to float32, or fetch or",
        ),
    ],
)
def test_logits_that_overflow_are_refused(
    root: Path, name: str, factor: float, engine: dict[str, str], pool_dtype: str, error: str
) -> None:
    tensors = random_tensors(json.loads((root / "model" / "config.json").read_text()), seed=0)
    tensors[name] *= np.float32(factor)
    write_weights(root / "model", tensors, "float32")
    with pytest.raises(CheckpointError, match=f"model: logits are finite {error}"):
        check(root, pipeline(engine, {"dtype": pool_dtype}))
    assert {path.name for path in (root / "build").iterdir()} == {".lock", "checkpoint"}

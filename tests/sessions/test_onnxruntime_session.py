"""What a session answers to a step, and what a build leaves on disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.sampling import sample_reference
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.opening import open_session
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def directory(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of one checkpoint, in every dtype of weights, and the converted checkpoint beside them."""
    directory = tmp_path_factory.mktemp("engines")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint", hidden_size=96, num_layers=3, vocab_size=267)
    for weights_dtype in ("float32", "int8", "int4"):
        build_tiny_engine(directory, checkpoint, weights_dtype=weights_dtype, kernels=kernels)
    return directory


@pytest.fixture(scope="module")
def session(directory: Path) -> Iterator[OnnxRuntimeSession]:
    opened = open_tiny_session(directory / "engine-float32-1")
    yield opened
    opened.close()


def test_sampled_rows_follow_their_own_rules_in_their_order(session: OnnxRuntimeSession) -> None:
    """In a step of several parts: rows of sequences that differ much in keys."""
    random = np.random.default_rng(0)
    texts = [Text(list(range(16 * index, 16 * index + 16))) for index in range(4)]
    for text, context in zip(texts, (200, 1, 60, 4), strict=True):
        run_text(session, text, random.integers(3, 260, context).tolist())
    batch = make_batch(texts, [random.integers(3, 260, count).tolist() for count in (2, 30, 1, 3)])
    num_rows = len(batch.input_ids)
    logits = session.forward_logits(batch)
    rules = replace(
        batch,
        temperature=random.choice([0.0, 0.7, 1.2], num_rows).astype(np.float32),
        top_k=random.choice([0, 3, 40], num_rows).astype(np.int32),
        top_p=random.choice([1.0, 0.9, 0.4], num_rows).astype(np.float32),
        uniform=random.random(num_rows).astype(np.float32),
    )
    columns = zip(logits, rules.temperature, rules.top_k, rules.top_p, rules.uniform, strict=True)
    expected = [sample_reference(row, float(t), int(k), float(p), float(u)) for row, t, k, p, u in columns]
    sampled = session.forward(rules).sampled_ids
    assert sampled.dtype == np.int32
    assert sampled.tolist() == expected
    order = random.permutation(num_rows)[:7]
    names = ("temperature", "top_k", "top_p", "uniform")
    shuffled = replace(
        rules, sample_rows=order.astype(np.int32), **{name: getattr(rules, name)[order] for name in names}
    )
    assert session.forward(shuffled).sampled_ids.tolist() == [expected[row] for row in order]


def test_a_step_that_samples_nothing(session: OnnxRuntimeSession) -> None:
    """A chunk of a prompt: no ids, but rows to commit."""
    ids = np.random.default_rng(1).integers(3, 260, 30).tolist()
    text, plain = Text([3, 9]), Text([20, 21])
    expected = run_text(session, plain, ids)[-1]
    batch = make_batch([text], [ids[:-1]])
    empty = {name: getattr(batch, name)[:0] for name in ("sample_rows", "temperature", "top_k", "top_p", "uniform")}
    assert session.forward(replace(batch, **empty)).sampled_ids.tolist() == []
    session.commit(np.arange(29), text.slots(0, 29))
    text.num_committed = 29
    np.testing.assert_array_equal(session.forward_logits(make_batch([text], [ids[-1:]]))[0], expected)


def test_a_step_that_fails_does_not_touch_the_next(
    session: OnnxRuntimeSession, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = (make_batch([Text([0])], [[5, token]]) for token in (6, 10**6))
    expected = session.forward_logits(good)
    for run in (session.forward, session.forward_logits):
        with pytest.raises(RuntimeError, match="out of data bounds"):
            run(bad)
        np.testing.assert_array_equal(session.forward_logits(good), expected)
    capfd.readouterr()  # ONNX Runtime logs its errors


@pytest.mark.parametrize(("weights_dtype", "share"), [("int8", 0.02), ("int4", 0.25)])
def test_quantised_weights_move_logits_little(
    directory: Path, session: OnnxRuntimeSession, weights_dtype: str, share: float
) -> None:
    """Root mean square of the change, as a share of the spread of the logits. Random weights are the worst case."""
    ids = np.random.default_rng(2).integers(3, 260, 100).tolist()
    expected = run_text(session, Text(list(range(8))), ids)
    quantised = open_tiny_session(directory / f"engine-{weights_dtype}-1")
    change = run_text(quantised, Text(list(range(8))), ids) - expected
    quantised.close()
    assert share / 10 < np.sqrt((change**2).mean()) / expected.std() < share


def test_float32_weights_are_shared_with_the_checkpoint(directory: Path) -> None:
    engine, converted = directory / "engine-float32-1", directory / "converted-float32"
    assert (engine / "rank0.safetensors").samefile(converted / "rank0.safetensors")
    assert set(tensor_locations(engine / "weights.safetensors")) == {"rotary.cosines", "rotary.sines"}


@pytest.mark.parametrize("weights_dtype", ["float32", "int8", "int4"])
def test_the_graph_is_valid_and_holds_no_weights(directory: Path, tmp_path: Path, weights_dtype: str) -> None:
    # A copy: onnx's checker refuses files with hard links.
    engine = Path(shutil.copytree(directory / f"engine-{weights_dtype}-1", tmp_path / "engine"))
    onnx.checker.check_model(engine / "model.onnx", full_check=True)
    model = onnx.load(engine / "model.onnx", load_external_data=False)
    inline = [tensor for tensor in model.graph.initializer if not tensor.external_data]
    assert sum(tensor.ByteSize() for tensor in inline) < 4096
    pools = [value.name for value in model.graph.input if value.name.startswith("kv_pool.")]
    assert pools == [f"kv_pool.{layer}" for layer in range(3)]
    assert [value.name for value in model.graph.output] == ["sampled_ids", "kv_rows", "logits"]
    names = {"config.json", "model.onnx", "weights.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in engine.iterdir()} - {"rank0.safetensors", "generation_config.json"} == names


def test_opening_by_backend(directory: Path) -> None:
    engine = directory / "engine-int8-1"
    opened = open_session(engine, load_engine_config(engine))
    assert isinstance(opened, OnnxRuntimeSession)
    opened.close()

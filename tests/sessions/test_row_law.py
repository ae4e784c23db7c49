"""The row law: the logits of a row are the same bits whatever stands beside it, however its text was cut or drafted.

It holds on tiny models of awkward sizes, with every kind of kernels, dtype of weights and of the pool, and number of
threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from tests.sessions.random_trees import path_to, random_tree
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "even": {"hidden_size": 64, "heads": 4, "kv_heads": 2},
    "all-heads": {"hidden_size": 96, "intermediate_size": 200, "vocab_size": 267, "heads": 6, "kv_heads": 6},
    "one-head": {
        "hidden_size": 72,
        "intermediate_size": 100,
        "vocab_size": 301,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 20,
    },
    "wide": {"hidden_size": 512, "heads": 4, "kv_heads": 2, "head_dim": 256},
    "thirds": {"hidden_size": 144, "intermediate_size": 336, "vocab_size": 500, "heads": 9, "kv_heads": 3, "tie": True},
    "two-of-four-experts": {"architecture": "mixtral", "hidden_size": 72, "heads": 3, "kv_heads": 1},
    "three-of-eight-experts": {"architecture": "qwen3_moe", "head_dim": 24, "tie": True},
    "sinks-and-clamped-experts": {"architecture": "gpt_oss", "hidden_size": 72, "heads": 3, "kv_heads": 1},
}
# Their networks meet one dtype each.
GEMMA3: dict[str, Any] = {
    "architecture": "gemma3",
    "head_dim": 24,
    "num_layers": 3,
    "tie": True,
    "extra_config": {"final_logit_softcapping": 6.0},
}
PHI4_MINI: dict[str, Any] = {"architecture": "phi3", "head_dim": 32, "extra_config": {"partial_rotary_factor": 0.75}}
DTYPES = ("float32", "int8", "int4")
# Every model and every dtype meets every number of threads, and both dtypes of pools.
CASES = [
    (model, dtype, (1, 2, 8)[(i + j) % 3], ("float32", "float16")[(i + j) % 2])
    for i, model in enumerate(MODELS)
    for j, dtype in enumerate(DTYPES)
] + [
    ("gemma3", "float32", 2, "float16"),
    ("gemma3", "int8", 1, "float32"),
    ("gemma2", "float32", 2, "float32"),
    ("phi4-mini", "int8", 2, "float32"),
    ("sinks", "float32", 2, "float16"),
    ("sinks", "int8", 1, "float32"),
]
MODELS |= {"gemma2": {"architecture": "gemma2", "head_dim": 24}, "gemma3": GEMMA3, "phi4-mini": PHI4_MINI}
MODELS["sinks"] = {"architecture": "mistral", "heads": 6, "head_dim": 24, "extra_config": {"sliding_window": 40}}
LENGTHS = (1, 2, 17, 40, 129, 170)
BLOCKS_PER_TEXT = 12


class Bench:
    """A session, texts, and the logits of each text run alone in one forward on one thread."""

    def __init__(self, engine: Path, vocab_size: int, num_threads: int) -> None:
        random = np.random.default_rng(0)
        self.texts = [random.integers(3, vocab_size, length).tolist() for length in LENGTHS]
        session = open_tiny_session(engine)
        self.logits = [run_text(session, self.new_text(index), ids) for index, ids in enumerate(self.texts)]
        session.close()
        self.session = OnnxRuntimeSession(engine, replace(load_engine_config(engine), num_threads=num_threads))

    def new_text(self, index: int) -> Text:
        return Text(list(range(index * BLOCKS_PER_TEXT, (index + 1) * BLOCKS_PER_TEXT)))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "{}-{}-{}-threads-{}-pool".format(*case))
def bench(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    model, dtype, num_threads, pool_dtype = request.param
    if (model, kernels) == ("wide", "onnxruntime"):
        pytest.skip("ONNX Runtime's products break the law for heads of this size")
    directory = tmp_path_factory.mktemp(f"{model}-{dtype}")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint", **MODELS[model])
    options: dict[str, Any] = {"weights_dtype": dtype, "pool_dtype": pool_dtype, "kernels": kernels}
    engine = build_tiny_engine(directory, checkpoint, **options, sinks=model == "sinks")
    bench = Bench(engine, MODELS[model].get("vocab_size", 320), num_threads)
    yield bench
    bench.session.close()


def random_cut(random: np.random.Generator, length: int) -> list[int]:
    ends = sorted({length, *random.integers(1, length + 1, random.integers(0, 6)).tolist()})
    return [end - first for first, end in itertools.pairwise([0, *ends])]


def check_rows(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(actual, expected)


def test_cuts_do_not_matter(bench: Bench) -> None:
    random = np.random.default_rng(1)
    for index, ids in enumerate(bench.texts):
        for chunks in ([len(ids)], [1] * len(ids) if len(ids) < 50 else None, random_cut(random, len(ids))):
            check_rows(run_text(bench.session, bench.new_text(index), ids, chunks), bench.logits[index])


def test_neighbours_do_not_matter(bench: Bench) -> None:
    """Random steps: some texts, each with some tokens committed and some in the step, some of them sampled."""
    random = np.random.default_rng(1)
    for index, ids in enumerate(bench.texts):
        run_text(bench.session, bench.new_text(index), ids)
    for _ in range(8):
        members = random.permutation(len(LENGTHS))[: random.integers(1, len(LENGTHS) + 1)].tolist()
        texts = [bench.new_text(index) for index in members]
        parts, expected = [], []
        for index, text in zip(members, texts, strict=True):
            text.num_committed = int(random.integers(LENGTHS[index]))
            count = min(int(random.choice([1, 1, 2, 8, 40])), LENGTHS[index] - text.num_committed)
            parts.append(bench.texts[index][text.num_committed : text.num_committed + count])
            expected.append(bench.logits[index][text.num_committed : text.num_committed + count])
        batch = make_batch(texts, parts)
        chosen = np.flatnonzero(random.random(len(batch.input_ids)) < 0.5)
        num_samples = len(chosen)
        fewer = replace(
            batch,
            sample_rows=chosen.astype(np.int32),
            **{name: getattr(batch, name)[:num_samples] for name in ("temperature", "top_k", "top_p", "uniform")},
        )
        rows = np.concatenate(expected)
        check_rows(bench.session.forward_logits(batch), rows)
        if num_samples:
            check_rows(bench.session.forward_logits(fewer), rows[chosen])


def test_drafts_do_not_matter(bench: Bench) -> None:
    """Rows on the true path of a draft are those of the plain text, beside wrong nodes and other drafts, step by step.

    With chunks of keys, trees lie in one; where none fits, a chain goes over the border.
    """
    random = np.random.default_rng(2)
    texts = [bench.new_text(index) for index in range(len(LENGTHS))]
    for text, ids in zip(texts, bench.texts, strict=True):
        if len(ids) > 1:
            run_text(bench.session, text, ids[: min(len(ids) - 1, int(random.integers(1, 100)))])
    while members := [index for index, text in enumerate(texts) if text.num_committed < LENGTHS[index]]:
        trees, drafts, paths = [], [], []
        for index in members:
            rest = bench.texts[index][texts[index].num_committed :]
            chunk, num_nodes = bench.session.key_chunk, int(random.integers(1, 65))
            room = chunk - texts[index].num_committed % chunk if chunk else num_nodes
            tree = random_tree(random, num_nodes) if num_nodes <= room else list(range(-1, num_nodes - 1))
            path = path_to(tree, int(random.integers(num_nodes)))[: len(rest)]
            draft = random.integers(3, 260, num_nodes)
            draft[path] = rest[: len(path)]
            trees.append(tree)
            drafts.append(draft.tolist())
            paths.append(path)
        batch = make_batch([texts[index] for index in members], drafts, trees)
        logits = bench.session.forward_logits(batch)
        rows, slots = [], []
        for index, first, path in zip(members, batch.sequence_starts.tolist(), paths, strict=False):
            text = texts[index]
            rows.append(first + np.array(path, np.int64))
            slots.append(text.slots(text.num_committed, len(path)))
            expected = bench.logits[index][text.num_committed : text.num_committed + len(path)]
            check_rows(logits[rows[-1]], expected)
            text.num_committed += len(path)
        bench.session.commit(np.concatenate(rows), np.concatenate(slots))

"""Trees in a step: each node sees its own path alone, and committing an accepted path continues the plain text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from tests.sessions.random_trees import path_to, random_tree
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import WINDOW, write_tiny_checkpoint

# Where a branching tree reaches over a chunk of keys, sums are cut at other keys than in the plain text: rounding of
# float32.
TOLERANCE = 1e-4


@pytest.fixture(
    scope="module", params=["llama", "mistral-window", "gemma2", "gemma3", "phi4-mini", "qwen3_moe", "gpt_oss"]
)
def session(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OnnxRuntimeSession]:
    directory = tmp_path_factory.mktemp("tree")
    checkpoint = directory / "checkpoint"
    options: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral-window": {"architecture": "mistral", "extra_config": {"sliding_window": WINDOW}},
        "gemma2": {"architecture": "gemma2", "head_dim": 24},
        "gemma3": {"architecture": "gemma3", "head_dim": 24},
        "qwen3_moe": {"architecture": "qwen3_moe"},
        "gpt_oss": {"architecture": "gpt_oss", "head_dim": 24},
        "phi4-mini": {"architecture": "phi3", "extra_config": {"partial_rotary_factor": 0.75}},
    }
    write_tiny_checkpoint(checkpoint, **options[request.param])
    opened = open_tiny_session(build_tiny_engine(directory, checkpoint, kernels=kernels))
    yield opened
    opened.close()


def logits_of_nodes(
    session: OnnxRuntimeSession, context: int, num_nodes: int, chosen: Sequence[int]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits of the chosen nodes of a random tree, and those of their plain texts."""
    random = np.random.default_rng(num_nodes)
    prefix, nodes = (random.integers(3, 260, count).tolist() for count in (context, num_nodes))
    parents = random_tree(random, num_nodes)
    text = Text(random.permutation(np.arange(40, 56)).tolist())
    run_text(session, text, prefix)
    # Beside it a second text, which makes the step ragged.
    other = Text(list(range(8)))
    run_text(session, other, prefix[:1])
    logits = session.forward_logits(make_batch([other, text], [[7], nodes], [None, parents]))[1:]
    plain = [
        run_text(session, Text(list(range(20, 36))), prefix + [nodes[index] for index in path_to(parents, node)])[-1]
        for node in chosen
    ]
    return logits[list(chosen)], np.array(plain)


@pytest.mark.parametrize(
    ("context", "num_nodes"),
    [(1, 2), (15, 9), (30, 40), (61, 64), (120, 8), (128, 64), (140, 100)],
)
def test_each_node_sees_its_path_alone(session: OnnxRuntimeSession, context: int, num_nodes: int) -> None:
    random = np.random.default_rng(context)
    chosen = random.choice(num_nodes, min(num_nodes, 12), replace=False).tolist()
    actual, expected = logits_of_nodes(session, context, num_nodes, chosen)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("context", "num_nodes"), [(100, 64), (127, 9), (90, 100)])
def test_a_tree_over_the_border_of_a_chunk_agrees(session: OnnxRuntimeSession, context: int, num_nodes: int) -> None:
    last = range(num_nodes - 6, num_nodes)
    actual, expected = logits_of_nodes(session, context, num_nodes, last)
    if not session.key_chunk:
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_a_chain_over_the_border_of_a_chunk_has_the_bits_of_its_text(session: OnnxRuntimeSession) -> None:
    ids = np.random.default_rng(4).integers(3, 260, 160).tolist()
    text = Text(list(range(16)))
    run_text(session, text, ids[:100])
    logits = session.forward_logits(make_batch([text], [ids[100:]], [None]))
    expected = run_text(session, Text(list(range(20, 36))), ids, [1] * 160)[100:]
    np.testing.assert_array_equal(logits, expected)


def test_a_chain_with_a_mask_is_a_chain_without(session: OnnxRuntimeSession) -> None:
    ids = np.random.default_rng(0).integers(3, 260, 70).tolist()
    text = Text(list(range(8)))
    run_text(session, text, ids[:20])
    with_mask = session.forward_logits(make_batch([text], [ids[20:]], [None]))
    np.testing.assert_array_equal(with_mask, session.forward_logits(make_batch([text], [ids[20:]])))


def test_committing_an_accepted_path_continues_the_text(session: OnnxRuntimeSession) -> None:
    """Three steps of a tree, each followed by the commit of one path, two texts at once; then a plain step."""
    random = np.random.default_rng(2)
    texts = [Text(list(range(16))), Text([40, 17, 30, 22, 35, 19])]
    written = [random.integers(3, 260, count).tolist() for count in (18, 5)]
    for text, ids in zip(texts, written, strict=True):
        run_text(session, text, ids)
    for num_nodes in (6, 33, 12):
        trees = [random_tree(random, num_nodes), random_tree(random, 4)]
        nodes = [random.integers(3, 260, len(tree)).tolist() for tree in trees]
        batch = make_batch(texts, nodes, trees)
        session.forward(batch)
        rows, slots = [], []
        for index, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            path = path_to(tree, int(random.integers(len(tree))))
            rows.append(batch.sequence_starts[index] + np.array(path, np.int64))
            slots.append(text.slots(text.num_committed, len(path)))
            text.num_committed += len(path)
            written[index] += [nodes[index][node] for node in path]
        session.commit(np.concatenate(rows), np.concatenate(slots))
    logits = session.forward_logits(make_batch(texts, [[9, 10], [11]]))
    first = run_text(session, Text(list(range(60, 76))), [*written[0], 9, 10])[-2:]
    second = run_text(session, Text(list(range(60, 76))), [*written[1], 11])[-1:]
    np.testing.assert_array_equal(logits, np.concatenate([first, second]))


def test_what_is_not_committed_leaves_no_trace(session: OnnxRuntimeSession) -> None:
    ids = np.random.default_rng(3).integers(3, 260, 20).tolist()
    text = Text(list(range(8)))
    run_text(session, text, ids)
    before = session.forward_logits(make_batch([text], [[5]]))
    session.forward(make_batch([text], [[7, 8, 9]], [[-1, 0, 0]]))
    np.testing.assert_array_equal(session.forward_logits(make_batch([text], [[5]])), before)

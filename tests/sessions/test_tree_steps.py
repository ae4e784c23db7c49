"""Trees in a step: each node sees its own path alone, and committing an accepted path continues the plain text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint

# A node's keys stand at other places than in its plain text, so sums go in another order: rounding of float32.
TOLERANCE = 1e-4
WINDOW = 24


@pytest.fixture(scope="module", params=["llama", "mistral-window"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxRuntimeSession]:
    directory = tmp_path_factory.mktemp("tree")
    checkpoint = directory / "checkpoint"
    if request.param == "llama":
        write_tiny_checkpoint(checkpoint)
    else:
        write_tiny_checkpoint(checkpoint, "mistral", extra_config={"sliding_window": WINDOW})
    opened = open_tiny_session(build_tiny_engine(directory, checkpoint))
    yield opened
    opened.close()


def path_to(parents: list[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else path_to(parents, parents[node])) + [node]


def random_tree(random: np.random.Generator, num_nodes: int) -> list[int]:
    return [-1, *(int(random.integers(max(0, node - 6), node)) for node in range(1, num_nodes))]


@pytest.mark.parametrize(("context", "num_nodes"), [(1, 2), (15, 9), (30, 40), (61, 70)])
def test_each_node_sees_its_path_alone(session: OnnxRuntimeSession, context: int, num_nodes: int) -> None:
    random = np.random.default_rng(num_nodes)
    prefix, nodes = (random.integers(3, 260, count).tolist() for count in (context, num_nodes))
    parents = random_tree(random, num_nodes)
    text = Text(list(range(20, 36)))
    run_text(session, text, prefix)
    # Beside it a second text, which makes the step ragged.
    other = Text(list(range(8)))
    run_text(session, other, prefix[:1])
    logits = session.forward_logits(make_batch([other, text], [[7], nodes], [None, parents]))[1:]
    for node in random.choice(num_nodes, min(num_nodes, 12), replace=False).tolist():
        path = [nodes[index] for index in path_to(parents, node)]
        alone = run_text(session, Text(list(range(40, 56))), prefix + path)[-1]
        np.testing.assert_allclose(logits[node], alone, rtol=0, atol=TOLERANCE)


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
    np.testing.assert_allclose(logits, np.concatenate([first, second]), rtol=0, atol=TOLERANCE)


def test_what_is_not_committed_leaves_no_trace(session: OnnxRuntimeSession) -> None:
    ids = np.random.default_rng(3).integers(3, 260, 20).tolist()
    text = Text(list(range(8)))
    run_text(session, text, ids)
    before = session.forward_logits(make_batch([text], [[5]]))
    session.forward(make_batch([text], [[7, 8, 9]], [[-1, 0, 0]]))
    np.testing.assert_array_equal(session.forward_logits(make_batch([text], [[5]])), before)

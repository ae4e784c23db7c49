"""Edits and raw logits through a session: each row gets its own, whatever parts a step runs in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftline.draft_trees import DraftTrees
from draftline.logit_edits import BANNED, LogitEdits, edit_logits_reference, edited_logits
from draftline.logit_rules import LogitRules, build_edits
from draftline.sampling import sample_reference
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.protocol import StepBatch
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module", params=["float32", "int4"])
def session(
    request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OnnxRuntimeSession]:
    directory = tmp_path_factory.mktemp("edits")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    engine = build_tiny_engine(directory, checkpoint, weights_dtype=request.param, kernels=kernels)
    opened = open_tiny_session(engine)
    yield opened
    opened.close()


def ragged_batch(session: OnnxRuntimeSession) -> StepBatch:
    """Sequences that differ so much in keys that the step runs in several parts."""
    random = np.random.default_rng(0)
    texts = [Text(list(range(16 * index, 16 * index + 16))) for index in range(4)]
    for text, context in zip(texts, (200, 1, 60, 4), strict=True):
        run_text(session, text, random.integers(3, 260, context).tolist())
    return make_batch(texts, [random.integers(3, 260, count).tolist() for count in (2, 30, 1, 3)])


def bans(rows: list[int], token_ids: list[int]) -> LogitEdits:
    ones = np.ones(len(rows), np.float32)
    return LogitEdits(np.array(rows, np.int32), np.array(token_ids, np.int32), 0 * ones, ones, BANNED * ones)


def test_each_row_is_edited_by_its_own_edits(session: OnnxRuntimeSession) -> None:
    random = np.random.default_rng(1)
    batch = ragged_batch(session)
    logits = session.forward_logits(batch)
    order = random.permutation(len(batch.input_ids))[:20].astype(np.int32)
    raw = logits[order]
    num_rows, vocab_size = raw.shape
    # Ban the two best tokens of every third row, and change others, in an order of the edits' own.
    best = np.argsort(-raw, axis=1)[:, :2]
    pairs = [(row, int(token)) for row in range(0, num_rows, 3) for token in best[row]]
    pairs += [(row, int(random.integers(vocab_size))) for row in range(1, num_rows, 3)]
    pairs = [pairs[index] for index in random.permutation(len(pairs))]
    ban = bans(*map(list, zip(*pairs, strict=True)))
    edits = replace(ban, bias=random.standard_normal(len(pairs)).astype(np.float32))
    edited = edited_logits(raw, edits)
    temperatures = random.choice([0.0, 0.9], num_rows).astype(np.float32)
    uniforms = random.random(num_rows).astype(np.float32)
    result = session.forward(
        replace(
            batch,
            sample_rows=order,
            temperature=temperatures,
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            uniform=uniforms,
            edits=edits,
            wants_logits=True,
        )
    )
    expected = [
        sample_reference(row, float(t), 0, 1.0, float(u))
        for row, t, u in zip(edited, temperatures, uniforms, strict=True)
    ]
    assert result.sampled_ids.tolist() == expected
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, raw)  # unedited


PARAMETERS: list[dict[str, Any] | None] = [
    {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "logit_bias": [(7, 0.5), (100, -1.0)]},
    None,
    {"presence_penalty": -0.4, "min_tokens": 3, "end_ids": range(3, 130), "bad_words": [(9,), (150, 151, 152)]},
]


def test_every_node_of_a_tree_draws_what_plain_decoding_would(session: OnnxRuntimeSession) -> None:
    """Three texts with rules of their own; each node's path is run again as plain text, edited by the reference."""
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 260, count).tolist() for count in (20, 6, 33)]
    prompts[2][-1] = 150
    texts = [Text(list(range(16 * index, 16 * index + 16))) for index in range(3)]
    for text, prompt in zip(texts, prompts, strict=True):
        run_text(session, text, prompt[:-1])
    num_nodes = 14
    trees = [[-1, *(int(random.integers(max(0, node - 5), node)) for node in range(1, num_nodes))] for _ in texts]
    nodes = [[prompt[-1], *random.choice([*prompt, 9, 151, 152], num_nodes - 1).tolist()] for prompt in prompts]
    nodes[2][1] = 151  # the first child of 150: what follows may not be 152
    trees[2][1] = 0

    token_ids = np.array(nodes, np.int32)
    log_probs, sources = np.zeros(token_ids.shape, np.float32), np.zeros(token_ids.shape, np.int8)
    drafted = DraftTrees(np.array(trees, np.int32), token_ids, log_probs, sources, np.full(len(texts), num_nodes))
    rules = [None if its is None else LogitRules(p, **its) for p, its in zip(prompts, PARAMETERS, strict=True)]
    num_rows = len(texts) * num_nodes
    temperatures = np.repeat(np.array([0.0, 0.8, 0.8], np.float32), num_nodes)
    uniforms = random.random(num_rows).astype(np.float32)
    batch = make_batch(texts, nodes, trees)
    edits = build_edits(rules, drafted)
    result = session.forward(replace(batch, temperature=temperatures, uniform=uniforms, edits=edits, wants_logits=True))
    assert result.logits is not None
    edited = edited_logits(result.logits, edits)

    for row in range(num_rows):
        index, node = divmod(row, num_nodes)
        path: list[int] = []
        while node > 0:
            path.insert(0, nodes[index][node])
            node = trees[index][node]
        whole = prompts[index] + path
        logits = run_text(session, Text(list(range(100, 116))), whole)[-1]
        expected = edit_logits_reference(logits, whole, len(prompts[index]), **(PARAMETERS[index] or {}))
        np.testing.assert_array_equal(edited[row], expected, err_msg=f"{index} {path}")
        drawn = sample_reference(expected, float(temperatures[row]), 0, 1.0, float(uniforms[row]))
        assert result.sampled_ids[row] == drawn, (index, path)


def test_a_part_without_edits_beside_one_with(session: OnnxRuntimeSession) -> None:
    batch = ragged_batch(session)
    plain = session.forward(batch)
    assert plain.logits is None
    last = len(batch.input_ids) - 1
    edited = session.forward(replace(batch, edits=bans([last], [int(plain.sampled_ids[last])])))
    assert edited.sampled_ids[:last].tolist() == plain.sampled_ids[:last].tolist()
    assert edited.sampled_ids[last] != plain.sampled_ids[last]
    assert session.forward(batch).sampled_ids.tolist() == plain.sampled_ids.tolist()  # nothing stays behind


def test_a_single_row(session: OnnxRuntimeSession) -> None:
    """The smallest step, which one dtype of weights computes twice."""
    batch = make_batch([Text([0])], [[9]])
    best = int(session.forward(batch).sampled_ids[0])
    result = session.forward(replace(batch, edits=bans([0], [best]), wants_logits=True))
    assert result.logits is not None
    second = np.argsort(-result.logits[0])[1]
    assert result.sampled_ids.tolist() == [second]


def test_logits_of_a_step_that_samples_nothing(session: OnnxRuntimeSession) -> None:
    batch = make_batch([Text([0])], [[9, 10]])
    empty = {name: getattr(batch, name)[:0] for name in ("sample_rows", "temperature", "top_k", "top_p", "uniform")}
    result = session.forward(replace(batch, **empty, wants_logits=True))
    assert result.logits is not None
    assert result.logits.shape == (0, session.forward_logits(batch).shape[1])

"""Cutting a step into parts: the parts are the whole, and where the cuts lie does not change a bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.sessions.batch_split import KEY_CHUNK, StepCost, split_batch
from draftline.sessions.protocol import StepBatch
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint

BLOCK_SIZE = 16
NEVER = StepCost(weights=1e30, per_key=1.0, per_key_and_row=1.0)
ALWAYS = StepCost(weights=0.0, per_key=1.0, per_key_and_row=1.0)


def batch_of(contexts: list[int], lengths: list[int], samples: list[int]) -> StepBatch:
    """A step whose arrays say where they come from: ids, temperatures are row numbers."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_rows, num_samples = int(starts[-1]), len(samples)
    columns = max(1, -(-max(contexts) // BLOCK_SIZE))
    table = np.full((len(contexts), columns), -1, np.int32)
    for row, context in enumerate(contexts):
        used = -(-context // BLOCK_SIZE)
        table[row, :used] = 1000 * row + np.arange(used)
    return StepBatch(
        input_ids=np.arange(num_rows, dtype=np.int32),
        position_ids=np.arange(num_rows, dtype=np.int32) + 7,
        sequence_starts=starts,
        context_lengths=np.array(contexts, np.int32),
        block_table=table,
        sample_rows=np.array(samples, np.int32),
        temperature=np.array(samples, np.float32),
        top_k=np.arange(num_samples, dtype=np.int32),
        top_p=np.ones(num_samples, np.float32),
        uniform=np.zeros(num_samples, np.float32),
        packed_mask=np.arange(num_rows, dtype=np.int32)[:, None],
    )


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    sequences = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=9))
    contexts, lengths = map(list, zip(*sequences, strict=True))
    samples = sorted(draw(st.sets(st.integers(0, sum(lengths) - 1), max_size=8)))
    return batch_of(contexts, lengths, samples)


@settings(deadline=None, max_examples=100)
@given(batches(), st.sampled_from([NEVER, ALWAYS, StepCost(2000.0, 1.0, 0.1)]))
def test_the_parts_are_the_whole(batch: StepBatch, cost: StepCost) -> None:
    parts = split_batch(batch, cost, BLOCK_SIZE)
    lengths = np.diff(batch.sequence_starts)
    assert sorted(np.concatenate([part.rows for part in parts]).tolist()) == list(range(len(batch.input_ids)))
    samples = np.concatenate([part.samples for part in parts])
    assert sorted(samples.tolist()) == list(range(len(batch.sample_rows)))
    by_first_row = {int(first): index for index, first in enumerate(batch.sequence_starts[:-1])}
    for part in parts:
        inner = part.batch
        np.testing.assert_array_equal(inner.input_ids, batch.input_ids[part.rows])
        np.testing.assert_array_equal(inner.position_ids, batch.position_ids[part.rows])
        np.testing.assert_array_equal(part.rows[inner.sample_rows], batch.sample_rows[part.samples])
        np.testing.assert_array_equal(inner.temperature, batch.temperature[part.samples])
        np.testing.assert_array_equal(inner.top_k, batch.top_k[part.samples])
        assert inner.packed_mask is not None
        assert batch.packed_mask is not None
        np.testing.assert_array_equal(inner.packed_mask, batch.packed_mask[part.rows])
        for row, (first, end) in enumerate(itertools.pairwise(inner.sequence_starts.tolist())):
            sequence = by_first_row[int(part.rows[first])]
            assert part.rows[first:end].tolist() == list(
                range(*batch.sequence_starts[sequence : sequence + 2].tolist())
            )
            context = int(batch.context_lengths[sequence])
            assert inner.context_lengths[row] == context
            used = -(-context // BLOCK_SIZE)
            assert inner.block_table[row, :used].tolist() == batch.block_table[sequence, :used].tolist()
            assert inner.block_table.shape[1] * BLOCK_SIZE >= context + lengths[sequence]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([0.0, 500.0, 5000.0]),
)
def test_no_cut_of_the_sorted_sequences_is_cheaper(sequences: list[tuple[int, int]], weights: float) -> None:
    cost = StepCost(weights, 1.0, 0.5)
    contexts, lengths = map(list, zip(*sequences, strict=True))
    shapes = sorted((length, -(-(context + length) // KEY_CHUNK) * KEY_CHUNK) for context, length in sequences)

    def price(cuts: tuple[int, ...]) -> float:
        parts = [shapes[first:end] for first, end in itertools.pairwise((0, *cuts, len(shapes)))]
        return sum(cost.part(len(part), max(r for r, _ in part), max(k for _, k in part)) for part in parts)

    inner_ends = range(1, len(shapes))
    cheapest = min(price(cuts) for n in range(len(shapes)) for cuts in itertools.combinations(inner_ends, n))
    parts = split_batch(batch_of(contexts, lengths, []), cost, BLOCK_SIZE)
    actual = 0.0
    for part in parts:
        rows = np.diff(part.batch.sequence_starts)
        actual += cost.part(len(rows), int(rows.max()), part.batch.block_table.shape[1] * BLOCK_SIZE)
    assert actual == pytest.approx(cheapest)


def test_cuts_do_not_change_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits, and what a commit after the step writes."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", num_layers=2)
    engine = build_tiny_engine(tmp_path, checkpoint, kernels="onnxruntime")
    random = np.random.default_rng(0)
    contexts, lengths = [0, 150, 3, 90, 31], [33, 1, 1, 5, 1]
    prefixes = [random.integers(3, 260, context).tolist() for context in contexts]
    ids = [random.integers(3, 260, length).tolist() for length in lengths]
    results = []
    for cost in (NEVER, ALWAYS):
        monkeypatch.setattr(StepCost, "of_model", lambda model, dtype, cost=cost: cost)
        session = open_tiny_session(engine)
        texts = [Text(list(range(12 * index, 12 * index + 12))) for index in range(len(contexts))]
        for text, prefix in zip(texts, prefixes, strict=True):
            if prefix:
                run_text(session, text, prefix)
        batch = make_batch(texts, ids)
        assert len(split_batch(batch, cost, BLOCK_SIZE)) == (1 if cost is NEVER else 4)  # two are alike
        logits = session.forward_logits(batch)
        slots = [text.slots(text.num_committed, count) for text, count in zip(texts, lengths, strict=True)]
        session.commit(np.arange(sum(lengths)), np.concatenate(slots))
        for text, count in zip(texts, lengths, strict=True):
            text.num_committed += count
        results.append((logits, session.forward_logits(make_batch(texts, [[5]] * len(texts)))))
        session.close()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)

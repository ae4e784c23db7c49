"""Padding of forwards: few shapes, everything that counts unchanged, nothing behind it read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import DraftlineError
from draftline.sessions.protocol import DraftBatch, StepBatch
from draftline.sessions.tensorrt.profiles import StepLimits, draft_profiles, target_profiles
from draftline.sessions.tensorrt.step_shapes import (
    check_fits,
    draft_feeds,
    draft_sizes,
    fits,
    padded_sizes,
    target_feeds,
    target_sizes,
)

LIMITS = StepLimits(16, 4096, 512, 16, 4096, max_nodes=16, frontier_nodes=4, grown_nodes=12)
DECODE = target_profiles(LIMITS)["decode"]
TREE = draft_profiles(LIMITS)["tree"]


def step(lengths: list[int], columns: int, num_sampled: int) -> StepBatch:
    num_rows = sum(lengths)
    zeros: Any = np.zeros(num_sampled, np.float32)
    return StepBatch(
        input_ids=np.arange(1, num_rows + 1, dtype=np.int32),
        position_ids=np.arange(num_rows, dtype=np.int32),
        sequence_starts=np.cumsum([0, *lengths]).astype(np.int32),
        context_lengths=np.full(len(lengths), 7, np.int32),
        block_table=np.arange(len(lengths) * columns, dtype=np.int32).reshape(len(lengths), columns),
        sample_rows=np.arange(num_sampled, dtype=np.int32) % num_rows,
        temperature=zeros,
        top_k=zeros.astype(np.int32),
        top_p=zeros + 1,
        uniform=zeros,
    )


steps = st.builds(
    lambda lengths, columns, share: step(lengths, columns, int(share * sum(lengths))),
    st.lists(st.integers(1, 16), min_size=1, max_size=16),
    st.integers(1, 256),
    st.floats(0, 1),
)


@given(steps)
def test_padding_is_behind_everything(batch: StepBatch) -> None:
    sizes = target_sizes(batch)
    assert fits(sizes, DECODE)
    padded = padded_sizes(sizes, DECODE, "T")
    assert all(sizes[name] <= padded[name] <= DECODE[name].high for name in sizes)
    assert padded["B"] <= padded["T"]
    feeds = target_feeds(batch, padded)
    num_rows, num_sequences = sizes["T"], sizes["B"]
    assert feeds["input_ids"][:num_rows].tolist() == batch.input_ids.tolist()
    starts = feeds["sequence_starts"]
    assert starts[: num_sequences + 1].tolist() == batch.sequence_starts.tolist()
    assert (starts[num_sequences:] == num_rows).all(), "padding sequences are empty"
    assert (feeds["block_table"][num_sequences:] == -1).all()
    assert (feeds["block_table"][:num_sequences, : sizes["max_blocks"]] == batch.block_table).all()
    assert not feeds["packed_mask"][num_rows:].any()
    assert (feeds["sample_rows"] < num_rows).all()
    for name, value in feeds.items():
        for dimension, size in zip(DIMENSIONS[name], value.shape, strict=True):
            assert size == (padded["B"] + 1 if dimension == "B_plus_1" else padded[dimension])


DIMENSIONS = {
    "input_ids": "T",
    "position_ids": "T",
    "sample_rows": "R",
    "block_table": ("B", "max_blocks"),
    "context_lengths": "B",
    "sequence_starts": ("B_plus_1",),
    "packed_mask": "TW",
}


def test_buckets_of_the_target_are_few() -> None:
    """Every decode step of an engine for 16 requests with trees of 16 nodes, within 4,096 tokens: 9 times 3 shapes."""
    shapes = set()
    for num_rows in range(1, 257):
        for columns in range(1, 257, 5):
            for num_sequences in {1, min(16, num_rows), min(5, num_rows)}:
                sizes = {"T": num_rows, "B": num_sequences, "R": num_rows // 2, "max_blocks": columns, "W": 1}
                shapes.add(tuple(padded_sizes(sizes, DECODE, "T").items()))
    assert len(shapes) == 9 * 3


def test_a_step_without_buckets_runs_as_it_is() -> None:
    batch = step([3, 1], 5, 0)
    sizes = target_sizes(batch)
    assert padded_sizes(sizes, DECODE) == sizes | {"R": 1}, "but no shape is empty"


def test_what_is_too_large_is_said_by_name() -> None:
    sizes = target_sizes(step([300], 5, 1))
    assert not fits(sizes, DECODE)
    with pytest.raises(DraftlineError, match="forward: T is at most 256 in the engine's profile; got 300; "):
        check_fits(sizes, DECODE)


def test_new_rows_of_a_drafter_stand_behind_the_padding_of_kept_ones() -> None:
    none: Any = np.zeros(2, np.float32)
    batch = DraftBatch(
        is_first=False,
        input_ids=np.array([41, 42, 43], np.int32),
        position_ids=np.array([9, 9, 5], np.int32),
        feature_rows=np.array([-1, -1, -3], np.int32),
        sequence_starts=np.array([0, 3, 6], np.int32),
        row_ids=np.array([0, 5, 6, 2, 3, 7], np.int32),  # 5 rows are kept
        context_lengths=np.array([8, 4], np.int32),
        block_table=np.zeros((2, 1), np.int32),
        candidate_rows=np.array([0, 2], np.int32),
        temperature=none,
        top_k=none.astype(np.int32),
        top_p=none + 1,
        uniform=none,
    )
    sizes = draft_sizes(batch, 5)
    assert sizes == {"N": 3, "T": 6, "M": 5, "B": 2, "R": 2, "max_blocks": 1, "W": 1}
    padded = padded_sizes(sizes, TREE, "N")
    assert padded == {"N": 4, "T": 8, "M": 8, "B": 4, "R": 4, "max_blocks": 16, "W": 1}
    feeds = draft_feeds(batch, padded, 5)
    assert feeds["row_ids"].tolist() == [0, 8, 9, 2, 3, 10, 0, 0]
    assert feeds["new_rows"].tolist() == [1, 2, 5, 0]
    assert feeds["candidate_rows"].tolist() == [0, 2, 0, 0]
    assert feeds["sequence_starts"].tolist() == [0, 3, 6, 6, 6]

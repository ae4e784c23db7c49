"""``d2t`` and ``t2d``: a subset of the target's vocabulary, in its order, said twice without contradiction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.draft_vocabulary import read_vocabulary_offsets
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError


def read(vocab_size: int, draft_vocab_size: int, **tensors: NDArray[Any]) -> NDArray[np.int64] | None:
    config = HeadConfig("eagle3", "float32", vocab_size, 8, 8, 1, draft_vocab_size=draft_vocab_size)

    def source(values: NDArray[Any]) -> SourceTensor:
        def chunks() -> Iterator[NDArray[Any]]:
            buffer = np.empty(min(3, values.size), values.dtype)  # one buffer for all chunks, as when a file is read
            for start in range(0, values.size, 3):
                part = values.reshape(-1)[start : start + 3]
                buffer[: part.size] = part
                yield buffer[: part.size]

        return SourceTensor(Path("model.safetensors"), str(values.dtype), values.shape, chunks)

    return read_vocabulary_offsets({name: source(values) for name, values in tensors.items()}, config, Path("head"))


@given(st.integers(2, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))))
def test_every_subset_is_read_and_every_change_of_it_found(case: tuple[int, set[int]]) -> None:
    vocab_size, members = case
    target_ids = np.array(sorted(members))
    offsets = target_ids - np.arange(len(target_ids))
    inside = np.isin(np.arange(vocab_size), target_ids)
    got = read(vocab_size, len(target_ids), d2t=offsets, t2d=inside)
    if len(target_ids) == vocab_size:
        assert got is None
    else:
        np.testing.assert_array_equal(got, offsets)
        np.testing.assert_array_equal(read(vocab_size, len(target_ids), d2t=offsets), offsets)
    for token_id in range(vocab_size):
        flipped = inside.copy()
        flipped[token_id] ^= True
        with pytest.raises(CheckpointError, match=f"1 target ids that differ, the first {token_id};"):
            read(vocab_size, len(target_ids), d2t=offsets, t2d=flipped)
    for draft_id in range(len(target_ids)):
        for change in (-vocab_size, vocab_size):
            wrong = offsets.copy()
            wrong[draft_id] += change
            with pytest.raises(CheckpointError, match="increasing target ids"):
                read(vocab_size, len(target_ids), d2t=wrong)


def test_a_whole_vocabulary_needs_neither_tensor() -> None:
    assert read(4, 4) is None
    assert read(4, 4, t2d=np.ones(4, bool)) is None
    with pytest.raises(CheckpointError, match="t2d is true for the target ids"):
        read(4, 4, t2d=np.array([True, True, False, True]))


def test_absolute_ids_in_place_of_offsets_are_refused() -> None:
    with pytest.raises(CheckpointError, match="got target id 12 for draft id 3"):
        read(12, 4, d2t=np.array([0, 4, 7, 9]))


@pytest.mark.parametrize(
    ("tensors", "rule"),
    [
        ({}, "a head of 2 of the target's 4 tokens has d2t; got no such tensor"),
        ({"d2t": np.zeros(2, np.int32)}, r"tensor d2t is int64 of shape \[2\]; got int32"),
        ({"d2t": np.zeros((2, 1), np.int64)}, r"got int64 of shape \[2, 1\]"),
        ({"d2t": np.zeros(3, np.int64)}, r"got int64 of shape \[3\]"),
        ({"d2t": np.zeros(2, np.int64), "t2d": np.array([1, 1, 0, 0])}, "tensor t2d is bool"),
        ({"d2t": np.zeros(2, np.int64), "t2d": np.array([True, True, False])}, r"t2d is bool of shape \[4\]"),
        ({"d2t": np.array([0, -1])}, "got target id 0 for draft id 1"),
        ({"d2t": np.array([-1, 0])}, "got target id -1 for draft id 0"),
        ({"d2t": np.array([0, 3])}, "got target id 4 for draft id 1"),
    ],
)
def test_what_breaks_a_rule_is_refused(tensors: dict[str, NDArray[Any]], rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        read(4, 2, **tensors)

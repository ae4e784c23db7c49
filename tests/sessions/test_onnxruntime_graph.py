"""Masks of chains."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftline.sessions.onnxruntime_graph import causal_mask
from draftline.tree import unpack_mask


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_causal_mask_is_a_triangle_per_sequence(lengths: list[int]) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = causal_mask(starts)
    assert packed.dtype == np.int32
    assert packed.shape == (sum(lengths), -(-max(lengths) // 32))
    mask = unpack_mask(packed, max(lengths))
    for first, length in zip(starts, lengths, strict=False):
        np.testing.assert_array_equal(mask[first : first + length], np.tri(length, max(lengths), dtype=bool))

"""Rows of growing trees: order, ids and masks against the mask of the whole tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runtime.drafters.in_step_rows import InStepRows
from draftline.tree import build_tree_mask, unpack_mask


@pytest.mark.parametrize("has_root", [False, True])
@given(
    seed=st.integers(0, 2**32 - 1),
    num_sequences=st.integers(1, 4),
    widths=st.lists(st.integers(1, 16), min_size=1, max_size=6),
)
def test_rows_see_their_ancestors(has_root: bool, seed: int, num_sequences: int, widths: list[int]) -> None:
    random = np.random.default_rng(seed)
    rows = InStepRows(np.arange(num_sequences), sum(widths), has_root=has_root)
    parents: list[list[int]] = [[-1] for _ in range(num_sequences)]  # of all nodes, the root first
    row_ids: list[list[int]] = [[sequence] for sequence in range(num_sequences)]
    next_row, num_before, first_before = num_sequences, 1, 0
    for width in widths:
        places = random.integers(0, num_before, (num_sequences, width))
        fed_by = rows.append(places, next_row)
        for sequence in range(num_sequences):
            new = (first_before + places[sequence]).tolist()
            assert fed_by[sequence].tolist() == [row_ids[sequence][parent] for parent in new]
            parents[sequence] += new
            row_ids[sequence] += range(next_row + sequence * width, next_row + (sequence + 1) * width)
        first_before, num_before = len(parents[0]) - width, width
        next_row += num_sequences * width

    starts, packed_ids, packed_mask = rows.pack()
    skipped = 0 if has_root else 1
    for sequence in range(num_sequences):
        first, last = starts[sequence : sequence + 2].tolist()
        assert packed_ids[first:last].tolist() == row_ids[sequence][skipped:]
        expected = build_tree_mask(parents[sequence])[skipped:, skipped:]
        assert np.array_equal(unpack_mask(packed_mask[first:last], last - first), expected)

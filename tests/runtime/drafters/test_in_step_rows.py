"""Rows of growing trees: order, ids and masks against the mask of the whole tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runtime.drafters.in_step_rows import InStepRows
from draftline.tree import build_tree_mask, unpack_mask


@pytest.mark.parametrize("has_root", [False, True])
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 4), num_depths=st.integers(1, 6))
def test_rows_see_their_ancestors(has_root: bool, seed: int, num_sequences: int, num_depths: int) -> None:
    random = np.random.default_rng(seed)
    pool_size = 1 + 8 * num_depths
    rows = InStepRows(np.arange(num_sequences), pool_size, has_root=has_root)
    parents_of = [{0: -1} for _ in range(num_sequences)]
    row_of = [{0: sequence} for sequence in range(num_sequences)]
    order: list[list[int]] = [
        [0] if has_root else [] for _ in range(num_sequences)
    ]  # -1: a row that stands for nothing
    next_row = num_sequences
    for depth in range(num_depths):
        width = int(random.integers(1, 9))
        nodes = 1 + 8 * depth + np.tile(np.arange(width), (num_sequences, 1))
        nodes[random.random(nodes.shape) < 0.2] = -1
        parents = np.array([random.choice(list(known), width) for known in parents_of])
        fed_by = rows.append(nodes, parents, next_row)
        for sequence, place in np.ndindex(*nodes.shape):
            node, parent = int(nodes[sequence, place]), int(parents[sequence, place])
            order[sequence].append(node)
            if node >= 0:
                assert fed_by[sequence, place] == row_of[sequence][parent]
                parents_of[sequence][node], row_of[sequence][node] = parent, next_row
            next_row += 1

    starts, row_ids, packed = rows.pack()
    for sequence in range(num_sequences):
        first, last = starts[sequence : sequence + 2].tolist()
        mask = unpack_mask(packed[first:last], last - first)
        assert mask.diagonal().all()
        assert not np.triu(mask, 1).any()
        places = [place for place, node in enumerate(order[sequence]) if node >= 0]
        nodes_run = [order[sequence][place] for place in places]
        assert row_ids[first:last][places].tolist() == [row_of[sequence][node] for node in nodes_run]
        everyone = sorted(parents_of[sequence])
        index = {node: place for place, node in enumerate(everyone)}
        whole = build_tree_mask([index.get(parents_of[sequence][node], -1) for node in everyone])
        kept = [index[node] for node in nodes_run]
        assert np.array_equal(mask[np.ix_(places, places)], whole[np.ix_(kept, kept)])

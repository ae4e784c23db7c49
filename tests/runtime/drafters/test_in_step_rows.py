"""Rows of growing trees: order, ids and masks against the mask of the whole tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.runtime.drafters.in_step_rows import InStepRows
from draftline.tree import build_tree_mask, unpack_mask


@pytest.mark.parametrize("has_root", [False, True])
@given(seed=st.integers(0, 2**32 - 1), num_sequences=st.integers(1, 4), num_levels=st.integers(1, 6))
def test_rows_see_their_ancestors(has_root: bool, seed: int, num_sequences: int, num_levels: int) -> None:
    random = np.random.default_rng(seed)
    pool_size = 1 + 8 * num_levels
    rows = InStepRows(np.arange(num_sequences), pool_size, has_root=has_root)
    parents_of = [{0: -1} for _ in range(num_sequences)]
    row_of = [{0: sequence} for sequence in range(num_sequences)]
    order = [[0] if has_root else [] for _ in range(num_sequences)]  # nodes of each sequence, as they were run
    next_row, next_node = num_sequences, 1
    for _ in range(num_levels):
        new = [int(random.integers(0, 9)) for _ in range(num_sequences)]
        owners = np.repeat(np.arange(num_sequences), new)
        ranks = np.concatenate([np.arange(count) for count in new])
        nodes = next_node + ranks
        parents = np.array([random.choice(list(parents_of[owner])) for owner in owners], dtype=np.int64)
        rows.append(owners, ranks, nodes, parents, next_row)
        for owner, node, parent in zip(owners.tolist(), nodes.tolist(), parents.tolist(), strict=True):
            parents_of[owner][node], row_of[owner][node] = parent, next_row
            order[owner].append(node)
            next_row += 1
        next_node += 8

    takes_part = np.array([bool(nodes) for nodes in order])
    if not takes_part.any():
        return
    starts, row_ids, packed = rows.pack(takes_part)
    parts = np.flatnonzero(takes_part).tolist()
    for part, sequence in enumerate(parts):
        first, last = starts[part : part + 2].tolist()
        nodes = order[sequence]
        assert row_ids[first:last].tolist() == [row_of[sequence][node] for node in nodes]
        assert rows.row_ids_of[sequence, nodes].tolist() == row_ids[first:last].tolist()
        everyone = sorted(parents_of[sequence])
        index = {node: place for place, node in enumerate(everyone)}
        whole = build_tree_mask([index.get(parents_of[sequence][node], -1) for node in everyone])
        expected = whole[np.ix_([index[node] for node in nodes], [index[node] for node in nodes])]
        assert np.array_equal(unpack_mask(packed[first:last], last - first), expected)

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.tree
from draftline.errors import DraftlineError
from draftline.tree import (
    build_tree_mask,
    causal_mask,
    chain_parents,
    leaf_paths,
    pack_mask,
    position_offsets,
    unpack_mask,
)


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    num_nodes = draw(st.integers(1, 70))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]


@settings(deadline=None)
@given(trees())
def test_a_node_attends_to_itself_and_its_ancestors(parents: list[int]) -> None:
    mask = build_tree_mask(parents)
    for node in range(len(parents)):
        path, ancestor = set(), node
        while ancestor >= 0:
            path.add(ancestor)
            ancestor = parents[ancestor]
        assert set(np.flatnonzero(mask[node]).tolist()) == path
        assert position_offsets(parents)[node] == len(path) - 1


@settings(deadline=None)
@given(trees())
def test_packing_is_lossless_and_little_endian(parents: list[int]) -> None:
    mask = build_tree_mask(parents)
    packed = pack_mask(mask)
    assert packed.dtype == np.int32
    assert packed.shape == (len(parents), -(-len(parents) // 32))
    assert np.array_equal(unpack_mask(packed, len(parents)), mask)
    for row, column in np.argwhere(mask)[:50].tolist():
        assert int(packed[row, column // 32]) >> (column % 32) & 1 == 1


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.tree).failed == 0


def test_a_chain_is_causal() -> None:
    assert np.array_equal(build_tree_mask(chain_parents(40)), np.tri(40, dtype=bool))
    assert position_offsets(chain_parents(4)).tolist() == [0, 1, 2, 3]
    assert pack_mask(build_tree_mask(chain_parents(33)))[31:].tolist() == [[-1, 0], [-1, 1]]


@pytest.mark.parametrize("parents", [[], [0], [-1, -1], [-1, 1], [-1, 0, 5], [[-1]]])
def test_bad_parents_are_refused(parents: list[int]) -> None:
    with pytest.raises(DraftlineError, match=r"parents\[0\] is -1"):
        build_tree_mask(parents)


@settings(deadline=None)
@given(trees())
def test_leaf_paths_run_from_the_root_to_every_leaf(parents: list[int]) -> None:
    paths = leaf_paths(parents)
    leaves = [node for node in range(len(parents)) if node not in parents]
    assert paths.dtype == np.int32
    assert paths.shape == (len(leaves), int(position_offsets(parents).max()) + 1)
    for leaf, path in zip(leaves, paths.tolist(), strict=True):
        nodes = [node for node in path if node >= 0]
        assert nodes + [-1] * (len(path) - len(nodes)) == path
        assert (nodes[0], nodes[-1]) == (0, leaf)
        assert [parents[node] for node in nodes] == [-1, *nodes[:-1]]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_a_causal_mask_is_a_triangle_per_sequence(lengths: list[int]) -> None:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = causal_mask(starts)
    assert packed.dtype == np.int32
    assert packed.shape == (sum(lengths), -(-max(lengths) // 32))
    mask = unpack_mask(packed, max(lengths))
    for first, length in zip(starts, lengths, strict=False):
        np.testing.assert_array_equal(mask[first : first + length], np.tri(length, max(lengths), dtype=bool))

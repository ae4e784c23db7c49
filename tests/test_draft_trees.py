from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.draft_trees
from draftline.draft_trees import DraftTrees, chain_trees, empty_trees, node_depths, packed_masks, roots_only
from draftline.tree import build_tree_mask, pack_mask, position_offsets
from draftline.tree_pruning import best_nodes, cumulative_log_probs, keep_best, keep_nodes, merge_trees

Path = tuple[int, ...]  # tokens from the root, which is ()


def trees_of(sequences: list[list[tuple[int, int, float, int]]], root_ids: list[int]) -> DraftTrees:
    """Pack (parent, token, log_prob, source) of draft nodes, one list per sequence."""
    trees = empty_trees(len(sequences), 1 + max(map(len, sequences), default=0))
    for row, nodes in enumerate(sequences):
        trees.token_ids[row, 0], trees.log_probs[row, 0] = root_ids[row], 0.0
        trees.num_nodes[row] = 1 + len(nodes)
        for node, (parent, token, log_prob, source) in enumerate(nodes, 1):
            trees.parents[row, node], trees.token_ids[row, node] = parent, token
            trees.log_probs[row, node], trees.sources[row, node] = log_prob, source
    return trees


@st.composite
def sequences(draw: st.DrawFn, source: int = 0) -> list[tuple[int, int, float, int]]:
    """One tree in which ties, probability 1 included, are frequent and siblings differ."""
    nodes: list[tuple[int, int, float, int]] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(draw(st.integers(0, 40))):
        place = draw(st.integers(0, len(nodes))), draw(st.integers(0, 4))
        if place not in taken:
            taken.add(place)
            nodes.append((*place, draw(st.sampled_from([0.0, -0.25, -0.5, -1.0, -3.3])), source))
    return nodes


@st.composite
def draft_trees(draw: st.DrawFn, num_sequences: int | None = None, source: int = 0) -> DraftTrees:
    count = draw(st.integers(1, 4)) if num_sequences is None else num_sequences
    return trees_of([draw(sequences(source)) for _ in range(count)], list(range(100, 100 + count)))


def paths_of(trees: DraftTrees, row: int) -> dict[Path, tuple[float, int]]:
    """Read a tree as {tokens from the root: (log_prob, source)}, in the order of its nodes."""
    paths: list[Path] = []
    read: dict[Path, tuple[float, int]] = {}
    for node in range(int(trees.num_nodes[row])):
        parent = int(trees.parents[row, node])
        assert parent < node
        assert (parent == -1) == (node == 0)
        paths.append((*paths[parent], int(trees.token_ids[row, node])) if node else ())
        assert paths[-1] not in read, "siblings have different tokens"
        read[paths[-1]] = float(trees.log_probs[row, node]), int(trees.sources[row, node])
    return read


def check_padding(trees: DraftTrees) -> None:
    assert trees.parents.shape[1] == trees.num_nodes.max()
    padding = np.arange(trees.parents.shape[1]) >= trees.num_nodes[:, None]
    assert (trees.parents[padding] == -1).all()
    assert (trees.token_ids[padding] == -1).all()
    assert (trees.log_probs[padding] == -np.inf).all()
    assert (trees.sources[padding] == -1).all()
    assert (trees.log_probs[:, 0] == 0).all()
    assert (trees.sources[:, 0] == -1).all()
    types = [array.dtype for array in (trees.parents, trees.token_ids, trees.log_probs, trees.sources, trees.num_nodes)]
    assert types == [np.int32, np.int32, np.float32, np.int8, np.int64]


def depth_of(trees: DraftTrees, row: int) -> list[int]:
    return position_offsets(trees.parents[row, : trees.num_nodes[row]]).tolist()


@settings(deadline=None)
@given(draft_trees())
def test_depths_and_masks_equal_those_of_one_tree(trees: DraftTrees) -> None:
    depths, masks = node_depths(trees), packed_masks(trees)
    width = trees.parents.shape[1]
    assert masks.dtype == np.int32
    assert masks.shape == (*trees.parents.shape, -(-width // 32))
    for row, count in enumerate(trees.num_nodes.tolist()):
        parents = trees.parents[row, :count]
        assert depths[row].tolist() == position_offsets(parents).tolist() + [-1] * (width - count)
        words = pack_mask(build_tree_mask(parents))
        assert np.array_equal(masks[row, :count, : words.shape[1]], words)
        assert not masks[row, :count, words.shape[1] :].any()
        assert not masks[row, count:].any()


@pytest.mark.parametrize("depth", [0, 1, 31, 32, 33, 70])
def test_masks_of_long_chains(depth: int) -> None:
    trees = chain_trees(
        np.zeros(1, np.int32),
        np.ones((1, depth), np.int32),
        np.zeros((1, depth), np.float32),
        np.array([depth]),
        source=2,
    )
    assert np.array_equal(packed_masks(trees)[0], pack_mask(np.tri(depth + 1, dtype=bool)))
    assert node_depths(trees)[0].tolist() == list(range(depth + 1))


@settings(deadline=None)
@given(draft_trees())
def test_what_the_trees_keep_about_themselves(trees: DraftTrees) -> None:
    num_sequences, width = trees.parents.shape
    depths = node_depths(trees)
    assert trees.tree_depths.tolist() == [max(depths[row, : trees.num_nodes[row]]) for row in range(num_sequences)]
    assert len(trees.ancestors) == int(max(trees.tree_depths)).bit_length()
    for power, ancestors in enumerate(trees.ancestors):
        for row in range(num_sequences):
            for node in range(width):
                above = node
                for _ in range(2**power):
                    above = above if trees.parents[row, above] < 0 else int(trees.parents[row, above])
                assert ancestors[row * width + node] == row * width + above
    packed = trees.pack(trees.token_ids)
    rows = zip(trees.token_ids, trees.num_nodes, strict=True)
    assert packed.tolist() == [token for ids, count in rows for token in ids[:count].tolist()]
    assert np.array_equal(trees.spread(packed), np.where(trees.is_node, trees.token_ids, 0))


@settings(deadline=None)
@given(draft_trees())
def test_cumulative_log_probs_add_up_and_never_exceed_the_parents(trees: DraftTrees) -> None:
    total = cumulative_log_probs(trees)
    assert total.dtype == np.float32
    for row, count in enumerate(trees.num_nodes.tolist()):
        assert total[row, 0] == 0
        assert (total[row, count:] == -np.inf).all()
        for node in range(1, count):
            parent = trees.parents[row, node]
            assert total[row, node] == np.float32(total[row, parent] + trees.log_probs[row, node])
            assert total[row, node] <= total[row, parent]


def test_a_rounded_log_softmax_above_zero_counts_as_certain() -> None:
    trees = trees_of([[(0, 1, 1e-7, 0), (1, 2, -0.5, 0)]], [9])
    assert cumulative_log_probs(trees).tolist() == [[0.0, 0.0, -0.5]]


def test_chains_of_all_lengths() -> None:
    trees = chain_trees(
        np.array([7, 8, 9], np.int32),
        np.array([[1, 2, 3], [4, 5, 6], [0, 0, 0]], np.int32),
        np.array([[-1, -2, -3]] * 3, np.float32),
        np.array([2, 1, 0]),
        source=1,
    )
    check_padding(trees)
    assert trees.num_nodes.tolist() == [3, 2, 1]
    assert paths_of(trees, 0) == {(): (0.0, -1), (1,): (-1.0, 1), (1, 2): (-2.0, 1)}
    assert paths_of(trees, 1) == {(): (0.0, -1), (4,): (-1.0, 1)}
    assert paths_of(trees, 2) == {(): (0.0, -1)}


def test_roots_only_may_be_wider_than_needed() -> None:
    trees = roots_only(np.array([7, 8], np.int32), 3)
    assert trees.parents.shape == (2, 3)
    assert trees.num_nodes.tolist() == [1, 1]
    check_padding(keep_nodes(trees, np.ones((2, 3), np.bool_)))


@settings(deadline=None)
@given(st.data(), draft_trees())
def test_kept_nodes_keep_their_paths_and_order(data: st.DataObject, trees: DraftTrees) -> None:
    keep = np.zeros(trees.parents.shape, np.bool_)
    keep[:, 0] = True
    for row, count in enumerate(trees.num_nodes.tolist()):
        for node in range(1, count):
            keep[row, node] = keep[row, trees.parents[row, node]] and data.draw(st.booleans())
    kept = keep_nodes(trees, keep)
    check_padding(kept)
    for row in range(len(keep)):
        everything = list(paths_of(trees, row).items())
        assert list(paths_of(kept, row).items()) == [everything[node] for node in np.flatnonzero(keep[row])]


@pytest.mark.parametrize("keep", [[True, False, True], [False, False, False]])
def test_a_node_cannot_be_kept_without_its_parent(keep: list[bool]) -> None:
    with pytest.raises(AssertionError, match=r"kept|keeps"):
        keep_nodes(trees_of([[(0, 1, -1.0, 0), (1, 2, -1.0, 0)]], [9]), np.array([keep]))


def best_of(trees: DraftTrees, row: int, max_nodes: int, chain_only: bool, max_depth: int) -> set[int]:
    """Choose nodes of one tree in plain Python."""
    parents, log_probs = trees.parents[row].tolist(), trees.log_probs[row].tolist()
    depths = depth_of(trees, row)
    nodes = list(range(len(depths)))
    if chain_only:
        chain = [0]
        while children := [node for node in nodes if parents[node] == chain[-1]]:
            chain.append(max(children, key=lambda node: (log_probs[node], -node)))
        nodes = chain
    total = cumulative_log_probs(trees)[row].tolist()
    ranked = sorted((-total[node], depths[node], node) for node in nodes if depths[node] <= max_depth)
    return {node for _, _, node in ranked[:max_nodes]}


@settings(deadline=None)
@given(st.data(), draft_trees())
def test_the_best_nodes_are_those_of_a_sort(data: st.DataObject, trees: DraftTrees) -> None:
    count = len(trees.num_nodes)
    max_nodes = data.draw(st.lists(st.integers(1, 45), min_size=count, max_size=count))
    chain_only = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    max_depths = data.draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))
    kept = keep_best(trees, np.array(max_nodes), np.array(chain_only), np.array(max_depths))
    check_padding(kept)
    for row in range(count):
        wanted = best_of(trees, row, max_nodes[row], chain_only[row], max_depths[row])
        everything = list(paths_of(trees, row).items())
        assert list(paths_of(kept, row).items()) == [everything[node] for node in sorted(wanted)]
        assert not chain_only[row] or depth_of(kept, row) == list(range(int(kept.num_nodes[row])))


def test_a_certain_child_never_costs_its_parent_the_place() -> None:
    # Two branches of probability 1/2 whose ends are certain: three nodes are both roots of the branches and one end.
    half = math.log(0.5)
    trees = trees_of([[(0, 1, half, 0), (1, 2, 0.0, 0), (2, 3, 0.0, 0), (0, 4, half, 0)]], [9])
    kept = keep_best(trees, np.array([4]), np.array([False]), np.array([9]))
    assert list(paths_of(kept, 0)) == [(), (1,), (1, 2), (4,)]


def test_nodes_of_no_probability_are_not_best() -> None:
    cumulative = np.array([[0.0, -1.0, -np.inf]], np.float32)
    assert best_nodes(cumulative, np.array([[0, 1, 1]]), np.array([3])).tolist() == [[True, True, False]]


def merged_paths(several: list[dict[Path, tuple[float, int]]]) -> dict[Path, tuple[float, int]]:
    """Join tries in plain Python."""
    merged: dict[Path, tuple[float, int]] = {}
    for paths in several:
        for path, (log_prob, source) in paths.items():
            if path not in merged or log_prob > merged[path][0]:
                merged[path] = log_prob, source
    return merged


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3).flatmap(lambda count: st.tuples(*(draft_trees(count, source) for source in range(3)))))
def test_merging_is_the_union_of_tries(several: tuple[DraftTrees, ...]) -> None:
    before = [trees.log_probs.copy() for trees in several]
    merged = merge_trees(several)
    check_padding(merged)
    for row in range(len(merged.num_nodes)):
        wanted = merged_paths([paths_of(trees, row) for trees in several])
        assert list(paths_of(merged, row).items()) == list(wanted.items())
        assert merged.token_ids[row, 0] == several[0].token_ids[row, 0]
    for trees, log_probs in zip(several, before, strict=True):
        assert np.array_equal(trees.log_probs, log_probs), "what is merged is left as it was"


def test_merging_by_hand() -> None:
    head = trees_of([[(0, 1, -0.7, 0), (0, 2, -0.9, 0), (1, 3, -0.1, 0)]], [9])
    lookup = trees_of([[(0, 2, -0.2, 1), (1, 5, -0.2, 1)]], [9])
    read = {path: source for path, (_, source) in paths_of(merge_trees([head, lookup]), 0).items()}
    assert list(read.items()) == [((), -1), ((1,), 0), ((2,), 1), ((1, 3), 0), ((2, 5), 1)]


def test_a_batch_may_be_empty() -> None:
    none, trees = np.zeros(0, np.int64), empty_trees(0, 3)
    assert node_depths(trees).shape == packed_masks(trees)[..., 0].shape == cumulative_log_probs(trees).shape == (0, 3)
    assert keep_best(trees, none, np.zeros(0, np.bool_), none).parents.shape == (0, 1)
    assert keep_nodes(trees, np.zeros((0, 3), np.bool_)).parents.shape == (0, 1)
    assert merge_trees([trees, trees]).parents.shape == (0, 1)
    assert roots_only(np.zeros(0, np.int32), 3).parents.shape == (0, 3)


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.draft_trees).failed == 0

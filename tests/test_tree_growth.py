from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import draftline.tree_growth
from draftline.choices import NAMED_CHOICES, build_static_tree
from draftline.draft_trees import DraftTrees, node_depths
from draftline.speculation import TreeShape
from draftline.tree_growth import TreeGrowth, grow_by_depth, max_frontier_nodes, needed_candidates

Path = tuple[int, ...]  # tokens from the root, the root included
Candidates = list[tuple[int, float]]
Draft = Callable[[Path], Candidates]  # most probable first; -inf = no candidate

LEVELS = (0.0, -0.25, -0.5, -0.75, -1.5)  # few and exact in float32: ties are frequent


def draft_of(seed: int, num_candidates: int, num_missing: int = 0) -> Draft:
    """Make a draft: a pure function of the path, with ties, certain tokens, and candidates that are missing."""

    def draft(path: Path) -> Candidates:
        generator = np.random.default_rng([seed, *path])
        tokens = generator.permutation(50)[:num_candidates].tolist()
        log_probs = sorted(generator.choice(LEVELS, size=num_candidates).tolist(), reverse=True)
        missing = int(generator.integers(0, num_missing + 1))
        log_probs[num_candidates - missing :] = [-math.inf] * missing
        return list(zip(tokens, log_probs, strict=True))

    return draft


def grow(shape: TreeShape, drafts: list[Draft], max_depths: list[int]) -> TreeGrowth:
    roots = np.arange(60, 60 + len(drafts), dtype=np.int32)
    growth = TreeGrowth(shape, roots, np.array(max_depths), source=3)
    paths: list[list[Path]] = [[()] for _ in drafts]
    while growth.frontier_ids.size:
        depth = growth.depth
        places = zip(growth.frontier_ids.tolist(), growth.frontier_parents.tolist(), paths, strict=True)
        paths = [
            [(*before[parent], token) for token, parent in zip(tokens, parents, strict=True)]
            for tokens, parents, before in places
        ]
        assert {len(path) for row in paths for path in row} == {depth + 1}
        pairs = np.array([[draft(path) for path in row] for draft, row in zip(drafts, paths, strict=True)])
        growth.expand(pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))
        assert growth.depth == depth + 1
    return growth


def read(trees: DraftTrees, row: int) -> list[tuple[Path, float]]:
    """Read a tree as (path, log_prob of its last token), in the order of its nodes."""
    nodes: list[tuple[Path, float]] = []
    for node in range(int(trees.num_nodes[row])):
        parent = int(trees.parents[row, node])
        assert parent < node
        before = nodes[parent][0] if node else ()
        nodes.append(((*before, int(trees.token_ids[row, node])), float(trees.log_probs[row, node])))
        assert trees.sources[row, node] == (3 if node else -1)
    return nodes


def eagle2(draft: Draft, root: int, top_k: int, max_depth: int, max_nodes: int) -> list[tuple[Path, float]]:
    """Draft one tree as EAGLE-2 does, in plain Python; equals go by depth, then in the order they were found."""
    pool: list[tuple[Path, float, float]] = [((root,), 0.0, 0.0)]  # path, log_prob, cumulative
    frontier = [pool[0]]
    for _ in range(max_depth):
        children = []
        for path, _, cumulative in frontier:
            for token, log_prob in draft(path):
                if log_prob > -math.inf:
                    children.append(((*path, token), log_prob, cumulative + log_prob))
        pool += children
        frontier = sorted(children, key=lambda node: -node[2])[:top_k]
    best = sorted(range(len(pool)), key=lambda node: (-pool[node][2], len(pool[node][0]), node))[:max_nodes]
    return [(pool[node][0], pool[node][1]) for node in sorted(best)]


@settings(deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from(["dynamic", "auto"]),
    st.integers(0, 2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=3),
)
def test_dynamic_trees_are_those_of_eagle2(
    seed: int, top_k: int, max_depth: int, kind: str, num_missing: int, limits: list[tuple[int, int]]
) -> None:
    shape = TreeShape(kind="dynamic" if kind == "dynamic" else "auto", max_nodes=30, max_depth=max_depth, top_k=top_k)
    drafts = [draft_of(seed + row, top_k, min(num_missing, top_k)) for row in range(len(limits))]
    growth = grow(shape, drafts, [depth for depth, _ in limits])
    trees = growth.finish(np.array([nodes for _, nodes in limits]), np.zeros(len(limits), np.bool_))
    for row, (depth, nodes) in enumerate(limits):
        assert read(trees, row) == eagle2(drafts[row], 60 + row, top_k, min(depth, max_depth), nodes)


def test_eagle2_with_certain_tokens_only() -> None:
    # All cumulative probabilities are equal: a rerank that breaks ties by chance drops parents here.
    shape = TreeShape(kind="dynamic", max_nodes=8, max_depth=4, top_k=3)
    growth = grow(shape, [lambda path: [(len(path), 0.0), (20, 0.0), (30, 0.0)]], [4])
    trees = growth.finish(np.array([8]), np.array([False]))
    assert [path for path, _ in read(trees, 0)] == [
        (60,), (60, 1), (60, 20), (60, 30), (60, 1, 2), (60, 1, 20), (60, 1, 30), (60, 20, 2),
    ]  # fmt: skip


def test_a_rounded_log_softmax_above_zero_counts_as_certain() -> None:
    shape = TreeShape("dynamic", 3, 2, 1)
    growth = grow(shape, [lambda path: [(len(path), 1e-7)]], [2])
    assert read(growth.finish(np.array([2]), np.array([False])), 0) == [((60,), 0.0), ((60, 1), 0.0)]


@st.composite
def static_shapes(draw: st.DrawFn) -> TreeShape:
    paths: set[Path] = {()}
    for _ in range(draw(st.integers(1, 20))):
        parent = draw(st.sampled_from(sorted(path for path in paths if len(path) < 5)))
        paths.add((*parent, draw(st.integers(0, 4))))
    choices = tuple(draw(st.permutations(sorted(paths - {()}))))
    return TreeShape("static", max_nodes=len(paths), max_depth=5, top_k=1, choices=choices)


@settings(deadline=None)
@given(static_shapes(), st.integers(0, 2**31), st.integers(0, 3), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_static_trees_take_the_ranks_of_their_choices(
    shape: TreeShape, seed: int, num_missing: int, max_depths: list[int]
) -> None:
    drafts = [draft_of(seed + row, 5, num_missing) for row in range(len(max_depths))]
    growth = grow(shape, drafts, max_depths)
    trees = growth.finish(np.full(len(drafts), 64), np.zeros(len(drafts), np.bool_))
    for row, max_depth in enumerate(max_depths):
        wanted: dict[Path, tuple[Path, float]] = {(): ((60 + row,), 0.0)}
        for choice in sorted(shape.choices, key=lambda path: (len(path), path)):
            if choice[:-1] in wanted and len(choice) <= max_depth:
                before = wanted[choice[:-1]][0]
                token, log_prob = drafts[row](before)[choice[-1]]
                if log_prob > -math.inf:
                    wanted[choice] = (*before, token), log_prob
        assert read(trees, row) == list(wanted.values())


def test_a_static_tree_is_pruned_by_cumulative_log_prob() -> None:
    shape = TreeShape("static", 5, 2, 1, choices=((0,), (1,), (0, 0), (1, 0)))
    growth = grow(shape, [lambda path: [(1, -0.5), (2, -1.0)]], [9])
    pruned = growth.finish(np.array([3]), np.array([False]))
    assert read(pruned, 0) == [((60,), 0.0), ((60, 1), -0.5), ((60, 2), -1.0)]  # -1.0 twice: the shallower stays


@settings(deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 6), min_size=1, max_size=3))
def test_chains_take_the_first_candidate(seed: int, max_depths: list[int]) -> None:
    shape = TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)
    drafts = [draft_of(seed + row, 2, num_missing=1) for row in range(len(max_depths))]
    trees = grow(shape, drafts, max_depths).finish(np.full(len(drafts), 64), np.zeros(len(drafts), np.bool_))
    for row, max_depth in enumerate(max_depths):
        path: list[tuple[Path, float]] = [((60 + row,), 0.0)]
        for _ in range(min(max_depth, 4)):
            token, log_prob = drafts[row](path[-1][0])[0]
            path.append(((*path[-1][0], token), log_prob))
        assert read(trees, row) == path


def test_chain_only_takes_the_most_probable_children() -> None:
    shape = TreeShape("dynamic", 9, 2, 2)
    growth = grow(shape, [lambda path: [(len(path), -0.5), (9, -1.0)]] * 2, [2, 2])
    trees = growth.finish(np.array([4, 4]), np.array([True, False]))
    assert [path for path, _ in read(trees, 0)] == [(60,), (60, 1), (60, 1, 2)]
    assert [path for path, _ in read(trees, 1)] == [(61,), (61, 1), (61, 9), (61, 1, 2)]
    assert growth.finish(np.array([2, 1]), np.array([True, True])).num_nodes.tolist() == [2, 1]


def test_the_frontier_is_bounded() -> None:
    for shape in (TreeShape("chain", 5, 4, 1), TreeShape("dynamic", 30, 4, 3), TreeShape("auto", 30, 1, 3)):
        growth = TreeGrowth(shape, np.array([60], np.int32), np.array([9]), source=3)
        num_nodes = 0
        while growth.frontier_ids.size:
            num_nodes += growth.frontier_ids.size * (growth.depth > 0)
            candidates = (*growth.frontier_ids.shape, 3)
            growth.expand(np.zeros(candidates, np.int32), np.zeros(candidates, np.float32))
        assert num_nodes == max_frontier_nodes(shape)


def test_depths_are_known() -> None:
    shape = TreeShape("dynamic", 30, 4, 3)
    growth = grow(shape, [draft_of(seed, 3, 1) for seed in range(4)], [4, 2, 0, 3])
    trees = growth.finish(np.array([30, 9, 9, 12]), np.array([False, False, False, True]))
    assert trees.known_depths is not None
    assert np.array_equal(trees.known_depths, node_depths(replace(trees, known_depths=None)))


def test_fewer_candidates_than_needed_are_as_good_as_none() -> None:
    shape = TreeShape("static", 4, 2, 1, choices=((0,), (7,), (0, 1)))
    trees = grow(shape, [lambda path: [(1, -0.5), (2, -1.0)]], [9]).finish(np.array([9]), np.array([False]))
    assert [path for path, _ in read(trees, 0)] == [(60,), (60, 1), (60, 1, 2)]


def heads(count: int, num_sequences: int, num_candidates: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    generator = np.random.default_rng(5)
    size = (num_sequences, count, num_candidates)
    ids = generator.permuted(np.broadcast_to(np.arange(30, dtype=np.int32), (*size[:2], 30)), axis=2)
    return ids[..., :num_candidates], -np.sort(generator.exponential(size=size)).astype(np.float32)


@pytest.mark.parametrize("name", ["mc_sim_7b_63", "vicuna_33b_stage1"])
def test_medusas_tree(name: str) -> None:
    choices = NAMED_CHOICES[name]
    shape = TreeShape("static", 64, 4, 1, choices=choices)
    ids, log_probs = heads(5, 2, needed_candidates(shape))
    roots = np.array([60, 61], np.int32)
    trees = grow_by_depth(shape, roots, np.array([9, 2]), ids, log_probs, source=3).finish(
        np.array([64, 64]), np.array([False, False])
    )
    tree = build_static_tree(choices)
    assert np.array_equal(trees.parents[0], tree.parents)
    assert trees.token_ids[0, 1:].tolist() == ids[0, tree.depths[1:] - 1, tree.ranks[1:]].tolist()
    assert trees.log_probs[0, 1:].tolist() == log_probs[0, tree.depths[1:] - 1, tree.ranks[1:]].tolist()
    assert trees.num_nodes.tolist() == [64, int((tree.depths <= 2).sum())]


@pytest.mark.parametrize("kind", ["chain", "dynamic", "auto"])
def test_heads_end_the_growth(kind: str) -> None:
    shape = TreeShape("chain" if kind == "chain" else "auto", 64, 5, 2)
    ids, log_probs = heads(2, 1, 3)
    growth = grow_by_depth(shape, np.array([60], np.int32), np.array([9]), ids, log_probs, source=3)
    assert growth.frontier_ids.size == 0
    assert growth.depth == 2


def test_how_many_candidates_are_needed() -> None:
    assert needed_candidates(TreeShape("chain", 9, 8, 4)) == 1
    assert needed_candidates(TreeShape("dynamic", 9, 8, 4)) == 4
    assert needed_candidates(TreeShape("auto", 9, 8, 5)) == 5
    assert needed_candidates(TreeShape("static", 64, 4, 1, NAMED_CHOICES["mc_sim_7b_63"])) == 10


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.tree_growth).failed == 0

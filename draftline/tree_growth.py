"""Growing draft trees depth by depth from a drafter's candidates: chains, static trees, EAGLE-2's dynamic trees."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from draftline.choices import build_static_tree
from draftline.draft_trees import DraftTrees
from draftline.speculation import TreeShape
from draftline.tree_pruning import best_nodes, compact_trees, first_children

_CERTAIN, _IMPOSSIBLE = np.float32(0.0), np.float32(-np.inf)


class TreeGrowth:
    """B trees that grow together: the drafter looks at the frontier, and hands the candidates after it to ``expand``.

    Source: EAGLE-2 (Li et al., 2024), sections 4.1 (expansion) and 4.2 (rerank): the ``top_k`` best nodes of a depth
    get ``top_k`` children each, all of which stay in the pool. Chains and static trees take given ranks instead.

    All trees keep the same shape while they grow: where one lacks a node (there was no candidate), its log-probability
    is -inf, whatever is said to stand below it never is a node, and its place in the frontier is padding.

    - ``depth``: of the frontier; 0 = the roots.
    - ``frontier_ids [B, F] int32``: tokens of the nodes whose candidates are wanted next; F = 0 at the end.
    - ``frontier_parents [B, F] int64``: the place of each one's parent in the frontier before.

    >>> shape = TreeShape(kind="dynamic", max_nodes=4, max_depth=2, top_k=2)
    >>> growth = TreeGrowth(shape, np.int32([9]), np.array([2]), source=0)
    >>> growth.expand(np.int32([[[1, 2]]]), np.log(np.float32([[[0.6, 0.3]]])))
    >>> growth.frontier_ids.tolist(), growth.frontier_parents.tolist()
    ([[1, 2]], [[0, 0]])
    >>> growth.expand(np.int32([[[3, 4], [5, 6]]]), np.log(np.float32([[[0.6, 0.4], [0.9, 0.1]]])))
    >>> growth.frontier_ids.size
    0
    >>> trees = growth.finish(np.array([4]), np.array([False]))  # paths: 1 0.6, 2 0.3, 1-3 0.36, 1-4 0.24, 2-5 0.27
    >>> trees.token_ids.tolist(), trees.parents.tolist()
    ([[9, 1, 2, 3]], [[-1, 0, 0, 1]])
    """

    def __init__(
        self, shape: TreeShape, root_ids: NDArray[np.int32], max_depths: NDArray[np.int64], source: int
    ) -> None:
        """``root_ids [B]``; ``max_depths [B]`` >= 0 bounds the depth of each, beside ``shape.max_depth``."""
        self._planned = _plan(shape)
        self._top_k, self._source, self._max_depths = shape.top_k, source, max_depths
        self._last_depth = min(shape.max_depth, int(max_depths.max(initial=0)))
        if self._planned is not None:
            self._last_depth = min(self._last_depth, len(self._planned))
        num_sequences = root_ids.shape[0]
        self._sequences = np.arange(num_sequences)[:, None]
        self._rows = roots = np.zeros((num_sequences, 1), dtype=np.int64)
        # The pool, depth by depth; a node's parent is a column of all of them side by side.
        self._parents, self._token_ids = [roots - 1], [root_ids[:, None]]
        self._log_probs = [np.zeros((num_sequences, 1), dtype=np.float32)]
        self._cumulative = [self._log_probs[0]]
        self._num_columns = 1
        self.depth = 0
        self.frontier_ids, self.frontier_parents = root_ids[:, None], roots
        self._frontier_columns, self._frontier_cumulative = roots, self._cumulative[0]
        if self._last_depth == 0:
            self.frontier_ids, self.frontier_parents = self.frontier_ids[:, :0], roots[:, :0]

    def expand(self, token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        """Take the candidates after every node of the frontier.

        Shapes: both ``[B, F, k]``, most probable first; log-probability -inf = no candidate; what stands beside
        padding of the frontier is ignored. Fewer than ``needed_candidates`` are as good as no candidates.
        """
        assert token_ids.shape == log_probs.shape
        assert token_ids.shape[:2] == self.frontier_ids.shape
        self.depth += 1
        if self._planned is None:
            self._expand_best(token_ids[..., : self._top_k], log_probs[..., : self._top_k])
        else:
            self._expand_planned(*self._planned[self.depth - 1], token_ids, log_probs)
        if self.depth == self._last_depth:
            self.frontier_ids, self.frontier_parents = self.frontier_ids[:, :0], self.frontier_parents[:, :0]

    def _expand_best(self, token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        num_sequences, _, num_candidates = token_ids.shape
        flat = (num_sequences, -1)
        own = np.minimum(log_probs, _CERTAIN)
        cumulative = (self._frontier_cumulative[:, :, None] + own).reshape(flat)
        tokens = token_ids.reshape(flat)
        self._append(np.repeat(self._frontier_columns, num_candidates, axis=1), tokens, own.reshape(flat), cumulative)
        if self.depth < self._last_depth:
            # A stable sort: of equals the first, as in the rerank.
            best = np.argsort(-cumulative, axis=1, kind="stable")[:, : self._top_k]
            self._frontier_cumulative = cumulative[self._sequences, best]
            self._frontier_columns = best + (self._num_columns - cumulative.shape[1])
            self.frontier_ids, self.frontier_parents = tokens[self._sequences, best], best // num_candidates

    def _expand_planned(
        self,
        places: NDArray[np.int64],
        ranks: NDArray[np.int64],
        next_nodes: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
    ) -> None:
        num_candidates = token_ids.shape[2]
        columns = places * num_candidates + ranks
        is_offered = ranks < num_candidates
        if not is_offered.all():
            columns = np.where(is_offered, columns, 0)
        flat = (len(token_ids), -1)
        tokens, own = token_ids.reshape(flat)[:, columns], np.minimum(log_probs.reshape(flat)[:, columns], _CERTAIN)
        if not is_offered.all():
            own = np.where(is_offered, own, _IMPOSSIBLE)
        cumulative = self._frontier_cumulative[:, places] + own
        self._append(self._frontier_columns[:, places], tokens, own, cumulative)
        self._frontier_cumulative = cumulative[:, next_nodes]
        self._frontier_columns = (self._rows + next_nodes) + (self._num_columns - len(places))
        self.frontier_ids, self.frontier_parents = tokens[:, next_nodes], self._rows + places[next_nodes]

    def _append(
        self,
        parents: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
        cumulative: NDArray[np.float32],
    ) -> None:
        self._parents.append(parents)
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        self._cumulative.append(cumulative)
        self._num_columns += token_ids.shape[1]

    def finish(self, max_nodes: NDArray[np.int64], chain_only: NDArray[np.bool_]) -> DraftTrees:
        """Choose the trees that are verified, by the same rule as ``draftline.tree_pruning.keep_best``.

        Shapes: ``max_nodes [B]`` >= 1, the root included; ``chain_only [B]``: no node beside the path of most probable
        children.
        """
        cumulative = np.concatenate(self._cumulative, axis=1)
        depths = _depths_of(tuple(part.shape[1] for part in self._cumulative))
        if self._max_depths.min(initial=self._last_depth) < self._last_depth:
            cumulative[depths > self._max_depths[:, None]] = -np.inf
        parents = np.concatenate(self._parents, axis=1, dtype=np.int32, casting="same_kind")
        log_probs = np.concatenate(self._log_probs, axis=1)
        if chain_only.any():
            path = first_children(parents, np.where(cumulative > -np.inf, log_probs, _IMPOSSIBLE))
            cumulative[~path & chain_only[:, None]] = -np.inf
        all_depths = np.broadcast_to(depths, parents.shape)
        pool = DraftTrees(
            parents,
            np.concatenate(self._token_ids, axis=1),
            log_probs,
            np.where(parents >= 0, np.int8(self._source), np.int8(-1)),
            np.full(len(parents), self._num_columns, dtype=np.int64),
            all_depths,
        )
        return compact_trees(pool, best_nodes(cumulative, all_depths, max_nodes))


def grow_by_depth(
    shape: TreeShape,
    root_ids: NDArray[np.int32],
    max_depths: NDArray[np.int64],
    head_ids: NDArray[np.int32],
    head_log_probs: NDArray[np.float32],
    source: int,
) -> TreeGrowth:
    """Grow trees whose candidates depend on the depth alone, as those of Medusa heads do: head h gives depth h + 1.

    Shapes: ``head_ids`` and ``head_log_probs [B, heads, k]``, most probable first; else as ``TreeGrowth``, which is
    returned ready to ``finish``.
    """
    num_heads = head_ids.shape[1]
    growth = TreeGrowth(shape, root_ids, np.minimum(max_depths, num_heads), source)
    while growth.frontier_ids.shape[1]:
        candidates = (*growth.frontier_ids.shape, head_ids.shape[2])
        head = growth.depth
        growth.expand(
            np.broadcast_to(head_ids[:, head, None], candidates),
            np.broadcast_to(head_log_probs[:, head, None], candidates),
        )
    return growth


def needed_candidates(shape: TreeShape) -> int:
    """Count the candidates after each node that trees of a shape can use: k of the drafter's graph.

    >>> needed_candidates(TreeShape("static", max_nodes=4, max_depth=2, top_k=1, choices=((0,), (3,), (0, 1))))
    4
    """
    if shape.kind == "chain":
        return 1
    if shape.kind == "static":
        return 1 + max(max(path) for path in shape.choices)
    return shape.top_k


@lru_cache(maxsize=64)
def _depths_of(widths: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the depth of each column of a pool with so many columns per depth."""
    return np.repeat(np.arange(len(widths)), widths)


_Plan = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@lru_cache(maxsize=16)  # a shape is planned once, not in every step
def _plan(shape: TreeShape) -> list[_Plan] | None:
    """Plan each depth of a chain or static tree.

    Returns, for the nodes of a depth, which place in the frontier their parents have and which rank they take, and
    which of these nodes have children: the next frontier. None where trees are dynamic.
    """
    if shape.kind == "chain":
        choices = tuple((0,) * depth for depth in range(1, shape.max_depth + 1))
    elif shape.kind == "static":
        choices = shape.choices
    else:
        return None
    tree = build_static_tree(choices)
    plan = []
    frontier = np.zeros(1, dtype=np.int64)
    for depth in range(1, int(tree.depths.max()) + 1):
        nodes = np.flatnonzero(tree.depths == depth)
        places = np.searchsorted(frontier, tree.parents[nodes])
        frontier = np.intersect1d(nodes, tree.parents)
        plan.append((places, tree.ranks[nodes].astype(np.int64), np.searchsorted(nodes, frontier)))
    return plan


def max_frontier_nodes(shape: TreeShape) -> int:
    """Count the nodes below the root whose candidates are asked for while a tree grows whole."""
    return sum(_frontier_sizes(shape))


def widest_frontier(shape: TreeShape) -> int:
    """Count those of the depth that has most of them."""
    return max(_frontier_sizes(shape), default=0)


def _frontier_sizes(shape: TreeShape) -> list[int]:
    """Count, depth by depth, the nodes below the root whose candidates are asked for while a tree grows whole."""
    planned = _plan(shape)
    if planned is None:
        return [shape.top_k] * (shape.max_depth - 1)
    return [len(next_nodes) for _, _, next_nodes in planned]

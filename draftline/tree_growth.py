"""Growing draft trees depth by depth from a drafter's candidates: chains, static trees, EAGLE-2's dynamic trees."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from draftline.choices import build_static_tree
from draftline.draft_trees import DraftTrees, best_nodes, compact_trees, first_children
from draftline.speculation import TreeShape


class TreeGrowth:
    """B trees that grow together: the drafter looks at ``frontier``, and hands the candidates after it to ``expand``.

    Source: EAGLE-2 (Li et al., 2024), sections 4.1 (expansion) and 4.2 (rerank): the ``top_k`` best nodes of a depth
    get ``top_k`` children each, all of which stay in the pool. Chains and static trees take given ranks instead.

    Every node that is or was considered has a column of the pool, the same in all sequences; parents come before
    children, and depths ascend. Where a sequence lacks the node (its tree has ended, or there was no candidate) the
    column is empty: parent, token and depth -1, log-probability -inf.

    >>> shape = TreeShape(kind="dynamic", max_nodes=4, max_depth=2, top_k=2)
    >>> growth = TreeGrowth(shape, np.int32([9]), np.array([2]), source=0)
    >>> growth.expand(np.int32([[[1, 2]]]), np.log(np.float32([[[0.6, 0.3]]])))
    >>> growth.frontier.tolist()
    [[1, 2]]
    >>> growth.expand(np.int32([[[3, 4], [5, 6]]]), np.log(np.float32([[[0.6, 0.4], [0.9, 0.1]]])))
    >>> growth.frontier.size
    0
    >>> trees = growth.finish(np.array([4]), np.array([False]))  # paths: 1 0.6, 2 0.3, 1-3 0.36, 1-4 0.24, 2-5 0.27
    >>> trees.token_ids.tolist(), trees.parents.tolist()
    ([[9, 1, 2, 3]], [[-1, 0, 0, 1]])
    """

    def __init__(
        self, shape: TreeShape, root_ids: NDArray[np.int32], max_depths: NDArray[np.int64], source: int
    ) -> None:
        """``root_ids [B]``; ``max_depths [B]`` >= 0 stops the growth of each, beside ``shape.max_depth``."""
        self._planned = _plan(shape)
        self._top_k = shape.top_k
        self._max_depths = np.minimum(max_depths, shape.max_depth)
        self._source = source
        num_sequences = root_ids.shape[0]
        self._sequences = np.arange(num_sequences)[:, None]
        pool = (num_sequences, pool_size(shape))
        self._parents = np.full(pool, -1, dtype=np.int32)
        self._token_ids = np.full(pool, -1, dtype=np.int32)
        self._log_probs = np.full(pool, -np.inf, dtype=np.float32)
        self._cumulative = np.full(pool, -np.inf, dtype=np.float32)
        self._depths = np.full(pool, -1, dtype=np.int64)
        self._token_ids[:, 0] = root_ids
        self._log_probs[:, 0] = self._cumulative[:, 0] = 0.0
        self._depths[:, 0] = 0
        self.num_pool = 1
        self._depth = 0
        self._set_frontier(np.zeros((num_sequences, 1), dtype=np.int64))

    @property
    def parents(self) -> NDArray[np.int32]:
        """Column of each node's parent: ``[B, num_pool]``."""
        return self._parents[:, : self.num_pool]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """``[B, num_pool]``."""
        return self._token_ids[:, : self.num_pool]

    @property
    def depths(self) -> NDArray[np.int64]:
        """``[B, num_pool]``."""
        return self._depths[:, : self.num_pool]

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Log-probability of each node given its parent: ``[B, num_pool]``."""
        return self._log_probs[:, : self.num_pool]

    def _set_frontier(self, frontier: NDArray[np.int64]) -> None:
        frontier = np.where((self._max_depths > self._depth)[:, None], frontier, -1)
        #: Columns of the nodes whose candidates are wanted next, ``[B, F] int64``, padded with -1; F = 0 at the end.
        self.frontier = frontier if (frontier >= 0).any() else frontier[:, :0]

    def expand(self, token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        """Take the candidates after every node of the frontier.

        Shapes: both ``[B, F, k]``, most probable first; log-probability -inf = no candidate; what stands beside
        padding of the frontier is ignored. Fewer than ``needed_candidates`` are as good as no candidates.
        """
        assert token_ids.shape == log_probs.shape
        assert token_ids.shape[:2] == self.frontier.shape
        self._depth += 1
        if self._planned is None:
            self._append_best(token_ids[..., : self._top_k], log_probs[..., : self._top_k])
        else:
            self._append_planned(*self._planned[self._depth - 1], token_ids, log_probs)

    def _append_best(self, token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        num_candidates = token_ids.shape[2]
        parents = np.repeat(self.frontier, num_candidates, axis=1)
        shape = parents.shape
        first = self.num_pool
        self._append(parents, token_ids.reshape(shape), log_probs.reshape(shape))
        cumulative = self._cumulative[:, first : self.num_pool]
        # A stable sort: of equals the first, as in the rerank.
        best = np.argsort(-cumulative, axis=1, kind="stable")[:, : self._top_k]
        self._set_frontier(np.where(cumulative[self._sequences, best] > -np.inf, best + first, -1))

    def _append_planned(
        self,
        places: NDArray[np.int64],
        ranks: NDArray[np.int64],
        next_columns: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        log_probs: NDArray[np.float32],
    ) -> None:
        num_candidates = token_ids.shape[2]
        flat = (len(self._sequences), self.frontier.shape[1] * num_candidates)
        taken = places * num_candidates + np.minimum(ranks, num_candidates - 1)
        taken_log_probs = log_probs.reshape(flat)[:, taken]
        taken_log_probs[:, ranks >= num_candidates] = -np.inf
        self._append(self.frontier[:, places], token_ids.reshape(flat)[:, taken], taken_log_probs)
        self._set_frontier(np.where(self._depths[:, next_columns] >= 0, next_columns, -1))

    def _append(self, parents: NDArray[np.int64], token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> None:
        columns = slice(self.num_pool, self.num_pool + parents.shape[1])
        exists = (parents >= 0) & (log_probs > -np.inf)
        own = self._log_probs[:, columns]
        np.minimum(log_probs, np.float32(0.0), out=own, where=exists)
        np.copyto(self._parents[:, columns], parents, where=exists, casting="same_kind")
        np.copyto(self._token_ids[:, columns], token_ids, where=exists)
        np.copyto(self._depths[:, columns], self._depth, where=exists)
        self._cumulative[:, columns] = self._cumulative[self._sequences, parents] + own
        self.num_pool = columns.stop

    def finish(self, max_nodes: NDArray[np.int64], chain_only: NDArray[np.bool_]) -> DraftTrees:
        """Choose the trees that are verified, by the same rule as ``draftline.draft_trees.keep_best``.

        Shapes: ``max_nodes [B]`` >= 1, the root included; ``chain_only [B]``: no node beside the path of most probable
        children.
        """
        cumulative = self._cumulative[:, : self.num_pool]
        if chain_only.any():
            path = first_children(self.parents, self.log_probs)
            cumulative = np.where(path | ~chain_only[:, None], cumulative, np.float32(-np.inf))
        sources = np.full(self.parents.shape, self._source, dtype=np.int8)
        sources[:, 0] = -1
        num_nodes = np.full(len(self._sequences), self.num_pool, dtype=np.int64)
        pool = DraftTrees(self.parents, self.token_ids, self.log_probs, sources, num_nodes, self.depths)
        return compact_trees(pool, best_nodes(cumulative, self.depths, max_nodes))


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
    for head in range(num_heads):
        if growth.frontier.size == 0:
            break
        candidates = (*growth.frontier.shape, head_ids.shape[2])
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


_Plan = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@lru_cache(maxsize=16)  # a shape is planned once, not in every step
def _plan(shape: TreeShape) -> list[_Plan] | None:
    """Plan each depth of a chain or static tree.

    Returns, for the nodes of a depth, which place in the frontier their parents have and which rank they take, and the
    columns of those that have children: the next frontier. None where trees are dynamic.
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
        plan.append((places, tree.ranks[nodes].astype(np.int64), frontier))
    return plan


def pool_size(shape: TreeShape) -> int:
    """Count the columns of the pool of a tree that grows whole."""
    if shape.kind == "chain":
        return 1 + shape.max_depth
    if shape.kind == "static":
        return 1 + len(shape.choices)
    return 1 + shape.top_k + max(0, shape.max_depth - 1) * shape.top_k**2

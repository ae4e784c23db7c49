"""The trees that one step drafts, one per sequence, as padded arrays: what drafters propose and the target verifies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True)
class DraftTrees:
    """B trees of at most N nodes.

    Shapes: all ``[B, N]``, rows padded behind ``num_nodes[b]`` nodes; ``num_nodes [B] int64``, the root included.

    - ``parents int32``: as in ``draftline.tree``, root and padding -1.
    - ``token_ids int32``: of the root, the sequence's last token; padding -1. Siblings have different tokens.
    - ``log_probs float32``: log of the draft's probability of a node given its parent; 0 at the root, -inf in padding.
    - ``sources int8``: which drafter proposed the node, an index into the pipeline's drafts; -1 at root and padding.
    - ``known_depths int64``: what ``node_depths`` says, of who built the trees and knew; None = it is computed.
    """

    parents: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sources: NDArray[np.int8]
    num_nodes: NDArray[np.int64]
    known_depths: NDArray[np.int64] | None = None

    # What follows is asked for several times in a step, and computed once. The arrays above stay as they are by then.

    @cached_property
    def is_node(self) -> NDArray[np.bool_]:
        """Tells nodes from padding, ``[B, N]``."""
        return _read_only(np.arange(self.parents.shape[1]) < self.num_nodes[:, None])

    @cached_property
    def num_rows(self) -> int:
        """How many nodes all trees have."""
        return int(self.num_nodes.sum())

    @cached_property
    def tree_depths(self) -> NDArray[np.int64]:
        """The depth of each tree, ``[B]``: 0 of a root alone."""
        return _read_only(self._depths.max(axis=1, initial=0))

    @cached_property
    def flat_parents(self) -> NDArray[np.int64]:
        """The function of this name, of ``parents``: ``[B * N]``."""
        return _read_only(flat_parents(self.parents))

    @cached_property
    def ancestors(self) -> tuple[NDArray[np.int64], ...]:
        """Which node stands 1, 2, 4, ... places above each, numbered as ``flat_parents`` does, up to the deepest."""
        above = [] if self.max_depth == 0 else [self.flat_parents]
        while 2 ** len(above) <= self.max_depth:
            above.append(above[-1][above[-1]])
        return tuple(above)

    @cached_property
    def _depths(self) -> NDArray[np.int64]:
        if self.known_depths is not None:
            return self.known_depths
        depths = count_hops(self.flat_parents).reshape(self.parents.shape)
        depths[~self.is_node] = -1
        return _read_only(depths)

    @cached_property
    def max_depth(self) -> int:
        """The depth of the deepest tree."""
        return max(self.tree_depths.tolist(), default=0)

    def pack(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Take the values ``[B, N, ...]`` of the nodes alone, tree by tree: ``[num_rows, ...]``."""
        if self.num_rows == self.is_node.size:
            return values.reshape(self.num_rows, *values.shape[2:])
        return values[self.is_node]

    def spread(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Undo ``pack``: ``[num_rows]`` values as ``[B, N]``, 0 in padding."""
        return spread_values(values, self.is_node, 0)


NodeIds = NDArray[np.int64]
Mask = NDArray[np.bool_]


def empty_trees(num_sequences: int, width: int) -> DraftTrees:
    """Build B trees of no node, all padding: what the builders fill in."""
    shape = (num_sequences, width)
    return DraftTrees(
        parents=np.full(shape, -1, dtype=np.int32),
        token_ids=np.full(shape, -1, dtype=np.int32),
        log_probs=np.full(shape, -np.inf, dtype=np.float32),
        sources=np.full(shape, -1, dtype=np.int8),
        num_nodes=np.zeros(num_sequences, dtype=np.int64),
    )


def roots_only(root_ids: NDArray[np.int32], width: int = 1) -> DraftTrees:
    """Build trees without draft tokens, padded to ``width``: ``root_ids [B]``.

    >>> roots_only(np.array([7, 8], dtype=np.int32), 2).token_ids.tolist()
    [[7, -1], [8, -1]]
    """
    trees = empty_trees(root_ids.shape[0], width)
    trees.token_ids[:, 0] = root_ids
    trees.log_probs[:, 0] = 0.0
    trees.num_nodes[:] = 1
    return trees


def chain_trees(
    root_ids: NDArray[np.int32],
    token_ids: NDArray[np.int32],
    log_probs: NDArray[np.float32],
    lengths: NDArray[np.int64],
    source: int,
) -> DraftTrees:
    """Build trees of one path each.

    Shapes: ``root_ids [B]``; ``token_ids`` and ``log_probs [B, D]``, of which sequence b has the first ``lengths[b]``,
    0 <= lengths <= D. The result is as wide as the longest.

    >>> chain_trees(np.int32([7]), np.int32([[1, 2, 3]]), np.float32([[-1, -1, -1]]), np.array([2]), 0).parents.tolist()
    [[-1, 0, 1]]
    """
    depth = int(lengths.max(initial=0))
    trees = roots_only(root_ids, depth + 1)
    drafted = np.arange(depth) < lengths[:, None]
    trees.parents[:, 1:] = np.where(drafted, np.arange(depth), -1)
    trees.token_ids[:, 1:] = np.where(drafted, token_ids[:, :depth], -1)
    trees.log_probs[:, 1:] = np.where(drafted, log_probs[:, :depth], -np.inf)
    trees.sources[:, 1:] = np.where(drafted, source, -1)
    trees.num_nodes[:] = lengths + 1
    return trees


def flat_parents(parents: NDArray[np.int32]) -> NodeIds:
    """Number the nodes of all sequences together: the parent of node ``b * N + i``; roots and padding are their own.

    Shapes: ``parents [B, N]`` -> ``[B * N] int64``. Functions of a node's whole path follow from repeated gathers.

    >>> flat_parents(np.int32([[-1, 0], [-1, 0]])).tolist()
    [0, 0, 2, 2]
    """
    width = parents.shape[1]
    # Parents precede children, and as an unsigned number -1 is the largest of all.
    own_or_parent = np.minimum(parents.view(np.uint32), np.arange(width, dtype=np.uint32))
    flat: NodeIds = np.arange(0, parents.size, max(width, 1))[:, None] + own_or_parent
    return flat.ravel()


def node_depths(trees: DraftTrees) -> NDArray[np.int64]:
    """Compute the depth of every node: ``[B, N] int64``, 0 at roots and -1 in padding.

    >>> trees = chain_trees(np.int32([7, 8]), np.int32([[1], [2]]), np.float32([[-1], [-1]]), np.array([1, 0]), 0)
    >>> node_depths(trees).tolist()
    [[0, 1], [0, -1]]
    """
    return trees._depths


def count_hops(ancestors: NodeIds) -> NDArray[np.int64]:
    """Count how often each node's ancestor is to be taken until a root is reached; roots are their own.

    >>> count_hops(np.array([0, 0, 1, 3])).tolist()
    [0, 1, 2, 0]
    """
    # Doubles the reach of every node's ancestor until all are roots: log2(depth) gathers.
    hops: NDArray[np.int64] = (ancestors != np.arange(ancestors.size)).astype(np.int64)
    while True:
        further = hops[ancestors]
        if not further.any():
            return hops
        hops += further
        ancestors = ancestors[ancestors]


def spread_values(values: NDArray[_Value], is_node: Mask, padding: float) -> NDArray[_Value]:
    """Put the values of all nodes, packed tree by tree, where ``is_node [B, N]`` has them."""
    if values.size == is_node.size:
        return values.reshape(is_node.shape)
    spread = np.full(is_node.shape, padding, dtype=values.dtype)
    spread[is_node] = values
    return spread


def _read_only(shared: NDArray[_Value]) -> NDArray[_Value]:
    shared.flags.writeable = False
    return shared


def packed_masks(trees: DraftTrees) -> NDArray[np.int32]:
    """Pack the mask in which a node attends to itself and its ancestors, as ``draftline.tree.pack_mask`` does.

    Shapes: ``[B, N, ceil(N / 32)] int32``; padding attends to nothing.

    >>> trees = chain_trees(np.int32([7]), np.int32([[1, 2]]), np.float32([[-1, -1]]), np.array([2]), 0)
    >>> packed_masks(trees)[0, :, 0].tolist()
    [1, 3, 7]
    """
    num_sequences, width = trees.parents.shape
    own = _own_bits(width)
    words = (trees.is_node * own[:, None]).reshape(len(own), num_sequences * width)
    for ancestors in trees.ancestors:
        for word in words:
            word |= word[ancestors]
    return words.T.reshape(num_sequences, width, len(own)).view(np.int32)


@lru_cache(maxsize=64)
def _own_bits(width: int) -> NDArray[np.uint32]:
    """Return the bit of each node in each word of a mask, ``[words, width]``."""
    nodes = np.arange(width)
    own = np.zeros((-(-width // 32), width), dtype=np.uint32)
    own[nodes // 32, nodes] = np.left_shift(1, nodes % 32).astype(np.uint32)
    return _read_only(own)

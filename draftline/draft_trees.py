"""The trees that one step drafts, one per sequence, as padded arrays: what drafters propose and the target verifies."""

from __future__ import annotations

from collections.abc import Sequence
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
        above = [] if self._max_depth == 0 else [self.flat_parents]
        while 2 ** len(above) <= self._max_depth:
            above.append(above[-1][above[-1]])
        return tuple(above)

    @cached_property
    def _depths(self) -> NDArray[np.int64]:
        if self.known_depths is not None:
            return self.known_depths
        depths = _hops(self.flat_parents).reshape(self.parents.shape)
        depths[~self.is_node] = -1
        return _read_only(depths)

    @cached_property
    def _max_depth(self) -> int:
        return max(self.tree_depths.tolist(), default=0)

    def pack(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Take the values ``[B, N, ...]`` of the nodes alone, tree by tree: ``[num_rows, ...]``."""
        if self.num_rows == self.is_node.size:
            return values.reshape(self.num_rows, *values.shape[2:])
        return values[self.is_node]

    def spread(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Undo ``pack``: ``[num_rows]`` values as ``[B, N]``, 0 in padding."""
        return _spread(values, self.is_node, 0)


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


def _hops(ancestors: NodeIds) -> NDArray[np.int64]:
    # Doubles the reach of every node's ancestor until all are roots: log2(depth) gathers.
    hops: NDArray[np.int64] = (ancestors != np.arange(ancestors.size)).astype(np.int64)
    while True:
        further = hops[ancestors]
        if not further.any():
            return hops
        hops += further
        ancestors = ancestors[ancestors]


def _spread(values: NDArray[_Value], is_node: Mask, padding: float) -> NDArray[_Value]:
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


def cumulative_log_probs(trees: DraftTrees) -> NDArray[np.float32]:
    """Compute the log of the draft's probability of every node's path: ``[B, N] float32``, -inf in padding.

    Numerics: float32, added from the root down, and log-probabilities above 0 (a rounding of log-softmax) count as 0.
    So a node never has more than its parent, not even in the last bit.
    """
    return _cumulative(trees)


def _cumulative(trees: DraftTrees) -> NDArray[np.float32]:
    own = np.minimum(trees.log_probs.ravel(), np.float32(0.0))
    total = own
    # After i rounds the nodes down to depth i + 1 are final: roots have 0 and are their own parents.
    for _ in range(trees._max_depth - 1):
        total = own + total[trees.flat_parents]
    return total.reshape(trees.parents.shape)


def keep_nodes(trees: DraftTrees, keep: Mask) -> DraftTrees:
    """Take some nodes of every tree, in their order, renumbered; the result is as wide as the largest tree.

    ``keep [B, N]`` holds the root, and with every node its parent; padding is never kept.
    """
    keep = keep & trees.is_node
    assert keep[:, 0].all(), "every tree keeps its root"
    assert keep.ravel()[flat_parents(trees.parents)][keep.ravel()].all(), "a kept node's parent is kept"
    return compact_trees(trees, keep)


def compact_trees(trees: DraftTrees, keep: Mask) -> DraftTrees:
    """Do what ``keep_nodes`` does, of a ``keep`` that is known to be closed under parents and without padding."""
    new_ids = keep.cumsum(axis=1, dtype=np.int32)
    num_nodes = new_ids[:, -1].astype(np.int64)
    new_ids -= 1
    is_node: Mask = np.arange(num_nodes.max(initial=1)) < num_nodes[:, None]
    nodes = np.flatnonzero(keep)
    parents = trees.parents.ravel()[nodes]
    # The place before a root's is another sequence's; it is looked at, and -1 taken instead.
    new_parents = new_ids.ravel()[np.arange(0, keep.size, keep.shape[1]).repeat(num_nodes) + parents]
    np.copyto(new_parents, np.int32(-1), where=parents < 0)

    return DraftTrees(
        parents=_spread(new_parents, is_node, -1),
        token_ids=_spread(trees.token_ids.ravel()[nodes], is_node, -1),
        log_probs=_spread(trees.log_probs.ravel()[nodes], is_node, -np.inf),
        sources=_spread(trees.sources.ravel()[nodes], is_node, -1),
        num_nodes=num_nodes,
        known_depths=None if trees.known_depths is None else _spread(trees.known_depths.ravel()[nodes], is_node, -1),
    )


def first_children(parents: NDArray[np.int32], log_probs: NDArray[np.float32]) -> Mask:
    """Find the path that takes the most probable child of every node, the first of equals: ``[B, N] bool``.

    Shapes: both ``[B, N]``; nodes of log-probability -inf are not taken. The path includes the root.
    """
    on_path = np.zeros(parents.shape, dtype=np.bool_)
    on_path[:, 0] = True
    sequences = np.arange(parents.shape[0])
    current = np.zeros_like(sequences)
    while sequences.size:
        children = np.where(parents[sequences] == current[:, None], log_probs[sequences], -np.inf)
        best = children.argmax(axis=1)
        found = children[np.arange(best.size), best] > -np.inf
        sequences, current = sequences[found], best[found]
        on_path[sequences, current] = True
    return on_path


def best_nodes(cumulative: NDArray[np.float32], depths: NDArray[np.int64], max_nodes: NDArray[np.int64]) -> Mask:
    """Choose the ``max_nodes[b]`` nodes of every tree with the most probable paths: ``[B, N] bool``, root included.

    Source: the rerank of EAGLE-2 (Li et al., 2024), section 4.2, which leaves ties to chance and with them, where a
    child has probability 1, can keep it without its parent. Here equals are taken by depth, then by index.

    Shapes: ``cumulative`` (<= 0, and at most the parent's; -inf = never taken) and ``depths [B, N]``, root first;
    ``max_nodes [B] >= 1``.
    """
    width = cumulative.shape[1]
    # The bits of a float that is not negative sort like the float; below them depth and index make every key unique.
    keys = (np.abs(cumulative).view(np.int32).astype(np.int64) << 32) + (depths * width + np.arange(width))
    last = np.minimum(max_nodes, width) - 1
    ranked = np.partition(keys, sorted(set(last.tolist()) or {0}), axis=1)
    limits = ranked[np.arange(last.size), last]
    best: Mask = (keys <= limits[:, None]) & (cumulative > -np.inf)
    return best


def keep_best(
    trees: DraftTrees, max_nodes: NDArray[np.int64], chain_only: Mask, max_depths: NDArray[np.int64]
) -> DraftTrees:
    """Take the best nodes of every tree, as ``best_nodes`` ranks them.

    Shapes: all ``[B]``; ``max_nodes`` counts the root; ``max_depths`` >= 0. ``chain_only`` takes no node beside the
    path of most probable children.
    """
    depths = node_depths(trees)
    candidates = depths <= max_depths[:, None]
    if chain_only.any():
        candidates &= first_children(trees.parents, trees.log_probs) | ~chain_only[:, None]
    cumulative = np.where(candidates, _cumulative(trees), np.float32(-np.inf))
    return compact_trees(trees, best_nodes(cumulative, depths, max_nodes))


def merge_trees(several: Sequence[DraftTrees]) -> DraftTrees:
    """Join the trees of several drafters into one per sequence: same parent and same token make one node.

    Such a node has the highest of the log-probabilities and the source that gave it, the earlier one among equals.
    Nodes of earlier trees come first; each tree's keep their order, so parents precede children. All have the same
    sequences and roots.
    """
    if len(several) == 1:
        return several[0]
    joined = _side_by_side(several)
    num_sequences, width = joined.parents.shape
    parents = flat_parents(joined.parents)
    depths = _hops(parents)
    depths[joined.token_ids.ravel() < 0] = -1
    tokens, log_probs, sources = joined.token_ids.ravel(), joined.log_probs.ravel(), joined.sources.ravel()
    node_ids = np.arange(parents.size)
    merged = np.where(depths == 0, node_ids - node_ids % width, node_ids)  # the node that stands for each
    for depth in range(1, int(depths.max(initial=0)) + 1):
        nodes = np.flatnonzero(depths == depth)
        keys = merged[parents[nodes]] << 32 | tokens[nodes]
        order = np.lexsort((-log_probs[nodes], keys))
        nodes, keys = nodes[order], keys[order]
        starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        firsts = np.minimum.reduceat(nodes, starts)
        merged[nodes] = np.repeat(firsts, np.diff(np.append(starts, nodes.size)))
        best = nodes[starts]
        log_probs[firsts], sources[firsts] = log_probs[best], sources[best]
    joined.parents[:] = np.where(joined.parents >= 0, (merged[parents] % width).reshape(joined.parents.shape), -1)
    keep = (merged == node_ids) & (depths >= 0)
    return compact_trees(joined, keep.reshape(num_sequences, width))


def _side_by_side(several: Sequence[DraftTrees]) -> DraftTrees:
    # Copies: the caller writes into them. Later roots stay, to be merged into the first.
    offsets = np.cumsum([0, *(trees.parents.shape[1] for trees in several)])
    parents = [
        np.where(trees.parents >= 0, trees.parents + offset, -1)
        for trees, offset in zip(several, offsets[:-1].tolist(), strict=True)
    ]
    return DraftTrees(
        parents=np.concatenate(parents, axis=1, dtype=np.int32),
        token_ids=np.concatenate([trees.token_ids for trees in several], axis=1),
        log_probs=np.concatenate([trees.log_probs for trees in several], axis=1),
        sources=np.concatenate([trees.sources for trees in several], axis=1),
        num_nodes=np.full(parents[0].shape[0], offsets[-1], dtype=np.int64),
    )

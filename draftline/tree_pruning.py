"""Cutting drafted trees down to what is verified, and merging the trees of several drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, Mask, count_hops, flat_parents, node_depths, spread_values


def cumulative_log_probs(trees: DraftTrees) -> NDArray[np.float32]:
    """Compute the log of the draft's probability of every node's path: ``[B, N] float32``, -inf in padding.

    Numerics: float32, added from the root down, and log-probabilities above 0 (a rounding of log-softmax) count as 0.
    So a node never has more than its parent, not even in the last bit.
    """
    own = np.minimum(trees.log_probs.ravel(), np.float32(0.0))
    total = own
    # After i rounds the nodes down to depth i + 1 are final: roots have 0 and are their own parents.
    for _ in range(trees.max_depth - 1):
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
        parents=spread_values(new_parents, is_node, -1),
        token_ids=spread_values(trees.token_ids.ravel()[nodes], is_node, -1),
        log_probs=spread_values(trees.log_probs.ravel()[nodes], is_node, -np.inf),
        sources=spread_values(trees.sources.ravel()[nodes], is_node, -1),
        num_nodes=num_nodes,
        known_depths=None
        if trees.known_depths is None
        else spread_values(trees.known_depths.ravel()[nodes], is_node, -1),
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
    cumulative = np.where(candidates, cumulative_log_probs(trees), np.float32(-np.inf))
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
    depths = count_hops(parents)
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

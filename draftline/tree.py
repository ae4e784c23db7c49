"""The shape of in-step tokens: a tree given by ``parents``, as masks and position offsets.

Source: tree attention of SpecInfer (Miao et al., 2023) and Medusa (Cai et al., 2024); the packed layout is
TensorRT-LLM's ``spec_decoding_packed_mask``. Node 0 is the root (the last committed token) and is counted in N.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftline.errors import DraftlineError


def _checked(parents: ArrayLike) -> NDArray[np.int32]:
    nodes = np.asarray(parents, dtype=np.int32)
    ordered = nodes.ndim == 1 and nodes.size > 0 and nodes[0] == -1
    if not ordered or not bool(np.all((nodes[1:] >= 0) & (nodes[1:] < np.arange(1, nodes.size)))):
        raise DraftlineError(
            "parents", "parents[0] is -1 and 0 <= parents[i] < i", nodes.tolist(), "number the nodes from the root down"
        )
    return nodes


def chain_parents(num_nodes: int) -> NDArray[np.int32]:
    """Build the tree without branches: ``[num_nodes] int32``.

    >>> chain_parents(3).tolist()
    [-1, 0, 1]
    """
    return np.arange(-1, num_nodes - 1, dtype=np.int32)


def build_tree_mask(parents: ArrayLike) -> NDArray[np.bool_]:
    """Build the mask in which a node attends to itself and its ancestors.

    Shapes: ``parents [N]`` -> ``[N, N] bool``; row = query, column = key.

    Raises: DraftlineError unless ``parents[0] == -1`` and ``0 <= parents[i] < i``.

    >>> build_tree_mask([-1, 0, 0]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    nodes = _checked(parents)
    mask = np.eye(nodes.size, dtype=np.bool_)
    for node in range(1, nodes.size):
        mask[node] |= mask[nodes[node]]
    return mask


def position_offsets(parents: ArrayLike) -> NDArray[np.int32]:
    """Compute the depth of every node, the root's being 0: ``[N] int32``.

    Raises: as ``build_tree_mask``.

    >>> position_offsets([-1, 0, 0, 2]).tolist()
    [0, 1, 1, 2]
    """
    nodes = _checked(parents)
    depths = np.zeros(nodes.size, dtype=np.int32)
    for node in range(1, nodes.size):
        depths[node] = depths[nodes[node]] + 1
    return depths


def leaf_paths(parents: ArrayLike) -> NDArray[np.int32]:
    """List the nodes from the root to every leaf: ``[L, D + 1] int32``, padded with -1, in the order of the leaves.

    Raises: as ``build_tree_mask``.

    >>> leaf_paths([-1, 0, 0, 2]).tolist()
    [[0, 1, -1], [0, 2, 3]]
    """
    nodes = _checked(parents)
    depths = position_offsets(nodes)
    ends = np.setdiff1d(np.arange(nodes.size, dtype=np.int32), nodes)
    paths = np.full((ends.size, int(depths.max()) + 1), -1, dtype=np.int32)
    for path, end in enumerate(ends.tolist()):
        node = end
        while node >= 0:
            paths[path, depths[node]] = node
            node = int(nodes[node])
    return paths


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Pack a mask into words: column j is bit ``j % 32`` of word ``j // 32``, least significant bit first.

    Shapes: ``mask [N, K] bool`` -> ``[N, ceil(K / 32)] int32`` (bit 31 makes a word negative); unused bits are 0.

    >>> pack_mask(build_tree_mask([-1, 0, 0])).tolist()
    [[1], [3], [5]]
    """
    num_rows, num_columns = mask.shape
    padded = np.zeros((num_rows, -(-num_columns // 32) * 32), dtype=np.bool_)
    padded[:, :num_columns] = mask
    return np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32, copy=False)


def unpack_mask(packed_mask: NDArray[np.int32], num_columns: int) -> NDArray[np.bool_]:
    """Undo ``pack_mask``: ``[N, W] int32`` -> ``[N, num_columns] bool``, where ``num_columns <= 32 * W``.

    >>> unpack_mask(np.array([[5]], dtype=np.int32), 3).tolist()
    [[True, False, True]]
    """
    octets = np.ascontiguousarray(packed_mask, dtype="<i4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=num_columns, bitorder="little").astype(np.bool_)


def causal_mask(sequence_starts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Build the packed mask of sequences whose in-step rows are chains.

    Shapes: ``sequence_starts [B + 1]`` -> ``[T, W] int32``: row i of a sequence may attend to its first i + 1 rows.

    >>> causal_mask(np.array([0, 3, 4], np.int32)).tolist()
    [[1], [3], [7], [1]]
    """
    if sequence_starts[-1] == len(sequence_starts) - 1:  # a row each: plain decoding, in every step
        return np.ones((len(sequence_starts) - 1, 1), np.int32)
    lengths = np.diff(sequence_starts)
    in_step = np.arange(sequence_starts[-1]) - np.repeat(sequence_starts[:-1], lengths)
    first_bits = np.arange(0, int(lengths.max()), 32)
    num_bits = np.clip(in_step[:, None] + 1 - first_bits, 0, 32).astype(np.int64)
    return ((1 << num_bits) - 1).astype(np.uint32).view(np.int32)

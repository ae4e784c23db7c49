"""The steps that a network check runs: a prefill from nothing, then trees behind what was committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.tree import build_tree_mask, chain_parents, pack_mask, position_offsets

Array = NDArray[Any]
KEY_CHUNK = 128  # tokens: the function's body asks for block tables over a multiple of it
PREFILL_LENGTHS = (40, 9)
TREE = (-1, 0, 0, 1, 1, 2)


@dataclass(frozen=True)
class Sequences:
    """B sequences of a step: ``contexts`` committed tokens and ``parents`` of the in-step rows of each.

    ``blocks``: of each, as many as its committed tokens ever need.
    """

    contexts: tuple[int, ...]
    parents: tuple[NDArray[np.int32], ...]
    blocks: tuple[NDArray[np.int32], ...]

    @property
    def starts(self) -> NDArray[np.int32]:
        return np.array([0, *accumulate(map(len, self.parents))], np.int32)

    @property
    def positions(self) -> NDArray[np.int32]:
        """Of every in-step row."""
        offsets = [context + position_offsets(own) for context, own in zip(self.contexts, self.parents, strict=True)]
        positions: NDArray[np.int32] = np.concatenate(offsets).astype(np.int32)
        return positions

    def attention_feeds(self, block_size: int) -> dict[str, Array]:
        """Return the graph inputs of ``AttentionInputs``."""
        starts, longest = self.starts, max(map(len, self.parents))
        mask = np.zeros((starts[-1], -(-longest // 32)), np.int32)
        for first, own in zip(starts[:-1], self.parents, strict=True):
            packed = pack_mask(build_tree_mask(own))
            mask[first : first + len(own), : packed.shape[1]] = packed
        keys = max(context + len(own) for context, own in zip(self.contexts, self.parents, strict=True))
        table = np.full((len(self.blocks), -(-keys // KEY_CHUNK) * KEY_CHUNK // block_size), -1, np.int32)
        for row, blocks in enumerate(self.blocks):
            table[row, : len(blocks)] = blocks
        contexts = np.array(self.contexts, np.int32)
        return {"block_table": table, "context_lengths": contexts, "sequence_starts": starts, "packed_mask": mask}

    def slots(self, sequence: int, positions: NDArray[np.int64], block_size: int) -> tuple[Array, Array]:
        """Return blocks and offsets of committed positions of one sequence."""
        return self.blocks[sequence][positions // block_size], positions % block_size


def prefill_sequences(max_seq_len: int, block_size: int, random: np.random.Generator) -> tuple[Sequences, int]:
    """Return sequences of which nothing is committed, and the number of blocks of the pools they live in."""
    lengths = [max(2, min(length, max_seq_len - len(TREE))) for length in PREFILL_LENGTHS]
    counts = [-(-length // block_size) for length in lengths]
    order = random.permutation(sum(counts) + 2).astype(np.int32)  # blocks are handed out in any order
    blocks = tuple(np.split(order, np.cumsum(counts))[: len(counts)])
    return Sequences((0,) * len(lengths), tuple(chain_parents(length) for length in lengths), blocks), len(order)


def tree_sequences(prefilled: Sequences) -> Sequences:
    """Return the same sequences after their prefill is committed: the first with a tree, others with two tokens."""
    contexts = tuple(len(own) for own in prefilled.parents)
    trees = [np.array(TREE, np.int32), *(chain_parents(2) for _ in contexts[1:])]
    return Sequences(contexts, tuple(trees), prefilled.blocks)


def empty_pools(num_layers: int, shape: tuple[int, int, int, int, int], dtype: np.dtype[Any]) -> dict[str, Array]:
    """Return pools ``kv_pool.L [num_blocks, 2, K, S, D]`` full of ones: what is not committed is not read."""
    return {f"kv_pool.{layer}": np.ones(shape, dtype) for layer in range(num_layers)}


def commit(pools: Mapping[str, Array], kv_rows: Array, sequences: Sequences, counts: Sequence[int]) -> None:
    """Write the first ``counts`` rows of each sequence into ``pools``; ``kv_rows [T, 2 * layers * K, D]``."""
    _, _, num_kv_heads, block_size, head_size = pools["kv_pool.0"].shape
    rows = kv_rows.reshape(len(kv_rows), len(pools), 2, num_kv_heads, head_size)
    for index, (first, count) in enumerate(zip(sequences.starts[:-1], counts, strict=True)):
        positions = sequences.contexts[index] + np.arange(count)
        blocks, offsets = sequences.slots(index, positions, block_size)
        for layer in range(len(pools)):
            pools[f"kv_pool.{layer}"][blocks, :, :, offsets] = rows[first : first + count, layer]

"""Sizes of a forward on a GPU: which profile takes it, and how it is padded to one of few buckets.

A CUDA graph replays one shape, so rows, sequences and block tables are padded. Padding rows lie behind
``sequence_starts[-1]``; padding sequences are empty and behind all others; neither is read by a row that counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DraftlineError
from draftline.sessions.protocol import DraftBatch, StepBatch
from draftline.tree import causal_mask

Bounds = Mapping[str, tuple[int, int, int]]  # of a profile: the smallest, best and largest size, by dimension
Sizes = Mapping[str, int]  # by dimension: T, B, R, max_blocks, W, and of drafters N and M
Feeds = dict[str, NDArray[Any]]

FOLLOWERS = ("B", "R")
GROWTH = {"max_blocks": 4}  # from a bucket to the next; 2 of every other dimension
FIRST = {"max_blocks": 16}


def bucket(dimension: str, size: int, largest: int) -> int:
    """Return the size of the bucket that ``size`` is padded to.

    >>> [bucket("T", size, 24) for size in (1, 3, 17)], [bucket("max_blocks", size, 200) for size in (3, 17, 70)]
    ([1, 4, 24], [16, 64, 200])
    """
    padded = FIRST.get(dimension, 1)
    while padded < size:
        padded *= GROWTH.get(dimension, 2)
    return min(padded, largest)


def fits(sizes: Sizes, bounds: Bounds) -> bool:
    """Tell whether a forward of ``sizes`` is within a profile; too small ones are padded."""
    return all(size <= bounds[name][2] for name, size in sizes.items())


def check_fits(sizes: Sizes, bounds: Bounds) -> None:
    """Raise DraftlineError, by the dimension's name, where a profile does not hold a forward."""
    for name, size in sizes.items():
        if size > bounds[name][2]:
            rule = f"{name} is at most {bounds[name][2]} in the engine's profile"
            raise DraftlineError("forward", rule, size, "build the engine for larger steps")


def padded_sizes(sizes: Sizes, bounds: Bounds, leader: str | None = None) -> dict[str, int]:
    """Return the sizes that run: no less than the profile's smallest, and with a ``leader`` those of buckets.

    Sequences and sampled rows then follow the rows of the dimension ``leader``, of which there are as many at least:
    what differs between buckets is how many rows, and how wide the block table.
    """
    padded = {name: max(size, bounds[name][0]) for name, size in sizes.items()}
    if leader is None:
        return padded
    rows = bucket(leader, padded[leader], bounds[leader][2])
    padded |= {name: max(padded[name], min(rows, bounds[name][2])) for name in FOLLOWERS}
    return {name: bucket(name, size, bounds[name][2]) for name, size in padded.items()}


def target_sizes(batch: StepBatch) -> dict[str, int]:
    num_sequences, columns = batch.block_table.shape
    return {
        "T": len(batch.input_ids),
        "B": num_sequences,
        "R": len(batch.sample_rows),
        "max_blocks": columns,
        "W": _mask_words(batch),
    }


def draft_sizes(batch: DraftBatch, num_kept: int) -> dict[str, int]:
    """``num_kept``: M, the rows of earlier forwards of this step; they are given whole."""
    num_sequences, columns = batch.block_table.shape
    return {
        "N": len(batch.input_ids),
        "T": len(batch.row_ids),
        "M": num_kept,
        "B": num_sequences,
        "R": len(batch.candidate_rows),
        "max_blocks": columns,
        "W": _mask_words(batch),
    }


def target_feeds(batch: StepBatch, sizes: Sizes) -> Feeds:
    """Return the inputs of the target's graph, padded to ``sizes``."""
    return {
        "input_ids": pad(batch.input_ids, sizes["T"]),
        "position_ids": pad(batch.position_ids, sizes["T"]),
        "sample_rows": pad(batch.sample_rows, sizes["R"]),
        **_attention_feeds(batch, sizes),
    }


def draft_feeds(batch: DraftBatch, sizes: Sizes, num_kept: int) -> Feeds:
    """Return the inputs of a drafter's graph that the host gives, padded to ``sizes``.

    Rows of the step have ids: those below ``num_kept`` are kept ones, and stay what they are; the new ones follow
    behind the padding of the kept ones.
    """
    num_new = len(batch.input_ids)
    is_new = batch.row_ids >= num_kept
    new_index = batch.row_ids[is_new] - num_kept
    new_rows = np.empty(num_new, np.int32)
    new_rows[new_index] = np.flatnonzero(is_new)
    row_ids = np.where(is_new, batch.row_ids - num_kept + sizes["M"], batch.row_ids).astype(np.int32)
    return {
        "input_ids": pad(batch.input_ids, sizes["N"]),
        "position_ids": pad(batch.position_ids, sizes["N"]),
        "candidate_rows": pad(batch.candidate_rows, sizes["R"]),
        "row_ids": pad(row_ids, sizes["T"]),
        "new_rows": pad(new_rows, sizes["N"]),
        **_attention_feeds(batch, sizes),
    }


def pad(values: NDArray[Any], *shape: int, filler: int = 0) -> NDArray[Any]:
    """Return ``values`` in the first corner of an array of ``shape``."""
    padded = np.full(shape, filler, values.dtype)
    padded[tuple(slice(size) for size in values.shape)] = values
    return padded


def _attention_feeds(batch: StepBatch | DraftBatch, sizes: Sizes) -> Feeds:
    num_sequences = len(batch.context_lengths)
    starts = np.full(sizes["B"] + 1, batch.sequence_starts[-1], np.int32)
    starts[: num_sequences + 1] = batch.sequence_starts
    return {
        "block_table": pad(batch.block_table, sizes["B"], sizes["max_blocks"], filler=-1),
        "context_lengths": pad(batch.context_lengths, sizes["B"]),
        "sequence_starts": starts,
        "packed_mask": pad(_mask(batch), sizes["T"], sizes["W"]),
    }


def _mask(batch: StepBatch | DraftBatch) -> NDArray[np.int32]:
    return causal_mask(batch.sequence_starts) if batch.packed_mask is None else batch.packed_mask


def _mask_words(batch: StepBatch | DraftBatch) -> int:
    if batch.packed_mask is not None:
        return batch.packed_mask.shape[1]
    return -(-int(np.diff(batch.sequence_starts).max()) // 32)

"""Bytes that a call of TreeAttention moves, counted from the kernels' own loops and addresses, without running them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.launches import attention_launches
from draftline.kernels.shape import DTYPE_BYTES, KernelConfiguration, KernelShape

INT_BYTES = 4
FLOAT_BYTES = 4
NODE_TILE = 32  # in-step keys of a tile


@dataclass
class MovedBytes:
    """Bytes by what they are: committed keys and values; rows of the step, and sinks; partial results; tables, masks,
    lengths."""

    pool: int = 0
    rows: int = 0
    partials: int = 0
    integers: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.rows + self.partials + self.integers


@dataclass(frozen=True)
class CountedStep:
    """The integers of a step, as the operator takes them: ``context_lengths [B]``, ``sequence_starts [B + 1]``,
    ``packed_mask [T, W]``, and the columns of the block table."""

    context_lengths: NDArray[np.int32]
    sequence_starts: NDArray[np.int32]
    packed_mask: NDArray[np.int32]
    max_blocks: int

    def depths(self) -> NDArray[np.int64]:
        bits = np.unpackbits(np.ascontiguousarray(self.packed_mask).view(np.uint8), axis=1)
        depths: NDArray[np.int64] = bits.sum(axis=1, dtype=np.int64) - 1
        return depths


def needed_bytes(shape: KernelShape, step: CountedStep) -> MovedBytes:
    """Count what any kernel must move: each key and value that a row attends to once, each row in and out once."""
    moved, depths = MovedBytes(), step.depths()
    element, size = DTYPE_BYTES[shape.dtype], shape.head_size
    moved.rows += shape.has_sinks * shape.num_heads * FLOAT_BYTES
    for sequence, context in enumerate(step.context_lengths.tolist()):
        first, end = (int(start) for start in step.sequence_starts[sequence : sequence + 2])
        length = end - first
        seen = 0 if shape.window <= 0 else max(0, context + int(depths[first:end].min()) + 1 - shape.window)
        moved.pool += max(0, context - seen) * shape.num_kv_heads * size * 2 * DTYPE_BYTES[shape.kv_dtype]
        moved.rows += length * (2 * shape.num_heads + 2 * shape.num_kv_heads) * size * element
        if seen < context:
            moved.integers += (-(-context // shape.block_size) - seen // shape.block_size) * INT_BYTES
        moved.integers += (length * -(-length // 32) + 2) * INT_BYTES
    return moved


def moved_bytes(shape: KernelShape, configuration: KernelConfiguration, step: CountedStep) -> MovedBytes:
    """Count what the kernels move: per program and load each address once, whatever a cache may hold.

    Follows ``plugins/tree_attention/gpu/attention.py`` and ``reduce.py`` loop by loop; a test holds it to the addresses
    that Triton's interpreter sees.
    """
    moved, depths = MovedBytes(), step.depths()
    num_sequences, num_tokens = len(step.context_lengths), len(step.packed_mask)
    launches = attention_launches(shape, configuration, num_tokens, num_sequences, step.max_blocks)
    tiles, _, sections = launches[0].grid
    rows = configuration.tile_rows // shape.group
    cuts = [_cut(shape, configuration, step, sequence) for sequence in range(num_sequences)]
    for tile in range(tiles):
        sequence, searched = _find_sequence(step.sequence_starts, tile, rows)
        moved.integers += shape.num_kv_heads * sections * (searched + 3) * INT_BYTES
        first, end = (int(start) for start in step.sequence_starts[sequence : sequence + 2])
        first_row = (tile - (first - sequence) // rows - sequence) * rows
        if first_row < end - first:
            tile_depths = depths[first + first_row : min(end, first + first_row + rows)]
            for section in range(cuts[sequence].sections):
                _count_program(moved, shape, configuration, cuts[sequence], section, first_row, tile_depths)
    if len(launches) > 1:
        for token in range(num_tokens):
            _count_merge(moved, shape, step, cuts, token, int(depths[token]))
    return moved


@dataclass(frozen=True)
class _Cut:
    context: int
    first_key: int
    section_keys: int
    sections: int

    def keys(self, section: int) -> tuple[int, int]:
        begin = self.first_key + section * self.section_keys
        return begin, min(begin + self.section_keys, self.context)

    def is_met(self, section: int, depth: int, window: int) -> bool:
        """Whether a row attends to any key of the section; the last one has the row itself."""
        begin, end = self.keys(section)
        seen = begin if window <= 0 else max(begin, self.context + depth + 1 - window)
        return section == self.sections - 1 or seen < end


def _cut(shape: KernelShape, configuration: KernelConfiguration, step: CountedStep, sequence: int) -> _Cut:
    context, tile = int(step.context_lengths[sequence]), configuration.tile_keys
    length = int(step.sequence_starts[sequence + 1] - step.sequence_starts[sequence])
    first_key = 0 if shape.window <= 0 else max(context + 1 - shape.window, 0) // tile * tile
    num_keys = context - first_key
    least = max(length * configuration.min_keys_per_row * shape.group, configuration.min_section_keys)
    sections = max(1, min(num_keys // least, configuration.max_sections))
    if length > configuration.max_split_rows:
        sections = 1
    keys = -(-num_keys // sections)
    section_keys = max(1, -(-keys // tile)) * tile
    return _Cut(context, first_key, section_keys, max(1, -(-num_keys // section_keys)))


def _find_sequence(starts: NDArray[np.int32], tile: int, rows: int) -> tuple[int, int]:
    """Return the sequence of a tile, and how many starts the search read."""
    low, high, reads = 0, len(starts) - 1, 0
    while high - low > 1:
        middle, reads = (low + high) // 2, reads + 1
        if (int(starts[middle]) - middle) // rows + middle <= tile:
            low = middle
        else:
            high = middle
    return low, reads


def _count_program(
    moved: MovedBytes,
    shape: KernelShape,
    configuration: KernelConfiguration,
    cut: _Cut,
    section: int,
    first_row: int,
    depths: NDArray[np.int64],
) -> None:
    """Add one program of each key/value head: rows of ``depths`` from ``first_row`` on over one section."""
    heads, size, element = shape.num_kv_heads, shape.head_size, DTYPE_BYTES[shape.dtype]
    num_rows, end_row = len(depths), first_row + len(depths)
    moved.rows += heads * num_rows * shape.group * size * element
    begin, end = cut.keys(section)
    if shape.window > 0:
        moved.integers += heads * 2 * num_rows * -(-end_row // 32) * INT_BYTES
        seen = max(0, cut.context + int(depths.min()) + 1 - shape.window)
        begin = max(begin, seen // configuration.tile_keys * configuration.tile_keys)
    for tile_begin in range(begin, end, configuration.tile_keys):
        tile_end = min(end, tile_begin + configuration.tile_keys)
        blocks = (tile_end - 1) // shape.block_size - tile_begin // shape.block_size + 1
        moved.integers += heads * blocks * INT_BYTES
        moved.pool += heads * (tile_end - tile_begin) * size * 2 * DTYPE_BYTES[shape.kv_dtype]
    if section == cut.sections - 1:
        moved.rows += heads * end_row * size * 2 * element
        moved.rows += shape.has_sinks * shape.num_heads * FLOAT_BYTES
        moved.integers += heads * num_rows * -(-end_row // NODE_TILE) * INT_BYTES
    if cut.sections == 1:
        moved.rows += heads * num_rows * shape.group * size * element
    else:
        met = sum(cut.is_met(section, depth, shape.window) for depth in depths.tolist())
        moved.partials += heads * shape.group * (met * size + 2 * num_rows) * FLOAT_BYTES


def _count_merge(
    moved: MovedBytes, shape: KernelShape, step: CountedStep, cuts: list[_Cut], token: int, depth: int
) -> None:
    """Add the programs of the second kernel for one token."""
    sequence, searched = _find_sequence(step.sequence_starts, token, 1)
    cut = cuts[sequence]
    moved.integers += shape.num_heads * (searched + 3) * INT_BYTES
    if token < step.sequence_starts[-1] and cut.sections > 1:
        met = sum(cut.is_met(section, depth, shape.window) for section in range(cut.sections))
        moved.partials += shape.num_heads * (met * shape.head_size + 2 * cut.sections) * FLOAT_BYTES
        moved.rows += shape.num_heads * shape.head_size * DTYPE_BYTES[shape.dtype]

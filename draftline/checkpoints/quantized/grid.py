"""Codes times scales: the grid of scales over a matrix, and the plain tensor that streams through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.quantized.parts import Parts
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.source_tensor import SourceTensor

WHOLE = 0  # in a block's size: all rows, or all columns


@dataclass(frozen=True)
class Grid:
    """Scales and zero points of a matrix ``[out, in]``, each for a block of ``block_rows`` by ``block_columns``.

    ``scales [R, C] float32``, R = ceil(out / block_rows), C = ceil(in / block_columns); ``zeros`` likewise, or None.
    ``groups [in]``: of each input the column of the grid, where inputs of a group do not stand side by side.
    ``factors [in] float32``: what the network multiplies inputs by, before the matrix.
    """

    scales: NDArray[np.float32]
    block_rows: int
    block_columns: int
    zeros: NDArray[np.float32] | None = None
    groups: NDArray[np.int32] | None = None
    factors: NDArray[np.float32] | None = None

    def dequantize(self, codes: NDArray[Any], first: int) -> NDArray[np.float32]:
        """Return ``(code - zero) * scale * factor`` of the rows that start at ``first``, ``codes [n, in]`` -> float32.

        Exact with scales of 16 bits and no factors; each product is rounded to nearest otherwise.
        """
        values = codes.astype(np.float32)
        rows = np.arange(first, first + len(codes)) // self.block_rows
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found where it is converted
            if self.zeros is not None:
                self._apply(np.subtract, values, self.zeros[rows])
            self._apply(np.multiply, values, self.scales[rows])
            if self.factors is not None:
                values *= self.factors
        return values

    def _apply(self, operation: np.ufunc, values: NDArray[np.float32], of_rows: NDArray[np.float32]) -> None:
        if self.groups is not None:
            operation(values, of_rows[:, self.groups], out=values)
            return
        num_whole = values.shape[1] // self.block_columns
        blocks = values[:, : num_whole * self.block_columns].reshape(len(values), num_whole, self.block_columns)
        assert np.shares_memory(blocks, values) or not blocks.size
        operation(blocks, of_rows[:, :num_whole, None], out=blocks)
        rest = values[:, num_whole * self.block_columns :]
        if rest.size:
            operation(rest, of_rows[:, num_whole:], out=rest)


def matrix_tensor(
    where: SourceTensor,
    shape: tuple[int, int],
    code_rows: Callable[[], Iterator[NDArray[Any]]],
    grid: Callable[[], Grid],
) -> SourceTensor:
    """Make the plain tensor of a matrix ``[out, in]``. ``code_rows()`` yields codes ``[n, in]``, in order of rows."""

    def chunks() -> Iterator[NDArray[Any]]:
        table, first = grid(), 0
        for codes in code_rows():
            yield table.dequantize(codes, first).reshape(-1)
            first += len(codes)

    return SourceTensor(where.where, "float32", shape, chunks)


def find_block(parts: Parts, key: str, shape: tuple[int, int], blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return which of ``blocks`` (rows, columns) the scales in the tensor ``key`` are for.

    Raises: CheckpointError where their number fits none of them.
    """
    stored = parts.tensors[key].shape
    sizes = [(rows or shape[0], columns or shape[1]) for rows, columns in blocks]
    grids = [(-(-shape[0] // rows), -(-shape[1] // columns)) for rows, columns in sizes]
    for size, grid in zip(sizes, grids, strict=True):
        flat = len(stored) in (0, 1, 4) and _without_ones(stored) == _without_ones(grid)
        if flat or stored == grid:
            return size
    wanted = " or ".join(str(list(grid)) for grid in dict.fromkeys(grids))
    raise parts.error(key, f"has shape {wanted} beside a matrix of {list(shape)}", list(stored))


def read_grid(tensor: SourceTensor, shape: tuple[int, int], block: tuple[int, int]) -> NDArray[np.float32]:
    """Read scales or zero points for blocks of a matrix of ``shape``, as ``[R, C] float32``."""
    return read_whole(tensor).astype(np.float32).reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)

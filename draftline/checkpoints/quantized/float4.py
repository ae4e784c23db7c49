"""NVFP4: codes of four bits (E2M1), a float8 scale for a group of inputs, and one scale for all of those.

Source: ``NVFP4QTensor`` of ModelOpt. A byte of ``[out, in / 2]`` holds two inputs, the even one low.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.quantized.grid import Grid, matrix_tensor, read_grid
from draftline.checkpoints.quantized.packing import unpack_octets
from draftline.checkpoints.quantized.parts import Parts
from draftline.checkpoints.quantized.scaled import FLOAT8, SCALE_DTYPES
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor

GROUP_SIZE = 16
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # of E2M1


def open_float4(
    parts: Parts,
    weight: str,
    scale: str,
    common: str,
    *,
    group_size: int = GROUP_SIZE,
    divides: bool = False,
    factors: str | None = None,
) -> SourceTensor:
    """Open the codes in the tensor ``weight``, with groups' scales in ``scale`` and the one for all in ``common``.

    ``divides``: scales are divided by ``common``, not multiplied. ``factors``: the tensor of what inputs are multiplied
    by, ``[in]``; it may be absent.

    Raises: CheckpointError where a tensor is missing, or of another dtype or shape.
    """
    codes = parts.tensor(weight, ("uint8",), (None, None))
    shape = (codes.shape[0], 2 * codes.shape[1])
    scales = parts.tensor(scale, (FLOAT8,), (shape[0], -(-shape[1] // group_size)))
    of_all = parts.tensor(common, ("float32",))
    if of_all.shape not in ((), (1,)):
        raise parts.error(common, "has shape []", list(of_all.shape))
    before = None if factors is None else parts.optional(factors, SCALE_DTYPES[:3], (shape[1],))

    def grid() -> Grid:
        table, one = read_grid(scales, shape, (1, group_size)), read_whole(of_all).reshape(())
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # found where weights are converted
            table = table / one if divides else table * one
        return Grid(table, 1, group_size, factors=None if before is None else read_whole(before).astype(np.float32))

    def code_rows() -> Iterator[NDArray[Any]]:
        for octets in stored_rows(codes, rows_per_chunk(shape[1])):
            yield VALUES[unpack_octets(octets, 4)]

    return matrix_tensor(codes, shape, code_rows, grid)

"""Matrices whose ``weight`` holds codes of eight bits as they are, float8 (E4M3) or int8, beside their scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.quantized.grid import Grid, find_block, matrix_tensor, read_grid
from draftline.checkpoints.quantized.layout import WEIGHT
from draftline.checkpoints.quantized.parts import Parts
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor

FLOAT8, INT8 = "float8_e4m3fn", "int8"
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


def open_scaled(
    parts: Parts,
    dtype: str,
    scale: str,
    blocks: Sequence[tuple[int, int]],
    *,
    zeros: str | None = None,
    factors: str | None = None,
) -> SourceTensor:
    """Open ``weight [out, in]``, whose scales are in the tensor ``scale``, one for each of one of ``blocks``.

    ``zeros``, ``factors``: the tensors of zero points, of the scales' shape, and of what inputs are multiplied by,
    ``[in]``; they may be absent.

    Raises: CheckpointError where a tensor is missing, or of another dtype or shape.
    """
    weight = parts.tensor(WEIGHT, (dtype,), (None, None))
    shape = (weight.shape[0], weight.shape[1])
    scales = parts.tensor(scale, SCALE_DTYPES)
    block = find_block(parts, scale, shape, blocks)
    offsets = None if zeros is None else parts.optional(zeros, (INT8,), scales.shape)
    before = None if factors is None else parts.optional(factors, SCALE_DTYPES[:3], (shape[1],))

    def grid() -> Grid:
        return Grid(
            read_grid(scales, shape, block),
            *block,
            zeros=None if offsets is None else read_grid(offsets, shape, block),
            factors=None if before is None else read_whole(before).astype(np.float32),
        )

    def code_rows() -> Iterator[NDArray[Any]]:
        return stored_rows(weight, rows_per_chunk(shape[1]))

    return matrix_tensor(weight, shape, code_rows, grid)

"""Stored tensors as they stream: rows, columns, or the whole of a small one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.source_tensor import SourceTensor

CHUNK_ELEMENTS = 1 << 20  # of float32 at a time: 4 MiB
SLAB_BYTES = 1 << 24  # of a matrix that is stored with its inputs as rows, at a time


def rows_per_chunk(num_columns: int) -> int:
    return max(1, CHUNK_ELEMENTS // num_columns)


def read_whole(tensor: SourceTensor) -> NDArray[Any]:
    """Read a small tensor."""
    values = np.empty(math.prod(tensor.shape), numpy_dtype(tensor.dtype))
    position = 0
    for chunk in tensor.chunks():
        values[position : position + chunk.size] = chunk
        position += chunk.size
    return values.reshape(tensor.shape)


def stored_rows(tensor: SourceTensor, num_rows: int) -> Iterator[NDArray[Any]]:
    """Yield ``num_rows`` rows of a matrix at a time, as they are stored; an array is valid until the next one."""
    num_rows = max(1, min(num_rows, tensor.shape[0]))
    buffer = np.empty((num_rows, tensor.shape[1]), numpy_dtype(tensor.dtype))
    flat, filled = buffer.reshape(-1), 0
    for chunk in tensor.chunks():
        while chunk.size:
            taken = min(chunk.size, flat.size - filled)
            flat[filled : filled + taken] = chunk[:taken]
            filled, chunk = filled + taken, chunk[taken:]
            if filled == flat.size:
                yield buffer
                filled = 0
    if filled:
        yield flat[:filled].reshape(-1, tensor.shape[1])


def stored_columns(tensor: SourceTensor, num_columns: int) -> Iterator[NDArray[Any]]:
    """Yield ``[n, rows]``: the matrix transposed, ``num_columns`` of its columns at a time.

    The tensor is read once per ``SLAB_BYTES`` of it, which are in memory: those of usual layers are read once or twice.
    """
    rows, columns = tensor.shape
    width = max(1, SLAB_BYTES // (rows * numpy_dtype(tensor.dtype).itemsize))
    for first in range(0, columns, width):
        slab = np.empty((rows, min(width, columns - first)), numpy_dtype(tensor.dtype))
        position = 0
        for part in stored_rows(tensor, CHUNK_ELEMENTS // columns):
            slab[position : position + len(part)] = part[:, first : first + width]
            position += len(part)
        for start in range(0, slab.shape[1], num_columns):
            yield np.ascontiguousarray(slab[:, start : start + num_columns].T)

"""Grids of scales over codes, and matrices that stream by rows and by columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.quantized import stored
from draftline.checkpoints.quantized.grid import Grid, find_block
from draftline.checkpoints.quantized.parts import Parts
from draftline.checkpoints.quantized.stored import read_whole, stored_columns, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError


def tensor_of(values: NDArray[Any], chunk: int) -> SourceTensor:
    """A tensor that comes in chunks of so many elements, which one buffer holds one after the other."""

    def chunks() -> Iterator[NDArray[Any]]:
        flat, buffer = values.reshape(-1), np.empty(chunk, values.dtype)
        for start in range(0, flat.size, chunk):
            part = flat[start : start + chunk]
            buffer[: part.size] = part
            yield buffer[: part.size]

    return SourceTensor(Path("file"), values.dtype.name, values.shape, chunks)


SIZES = st.integers(1, 12)


@settings(deadline=None)
@given(
    rows=SIZES, columns=SIZES, block_rows=SIZES, block_columns=SIZES, first=st.integers(0, 11), seed=st.integers(0, 9)
)
def test_each_block_has_its_scale_and_zero_point(
    rows: int, columns: int, block_rows: int, block_columns: int, first: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    shape = (-(-rows // block_rows), -(-columns // block_columns))
    scales = generator.standard_normal(shape, np.float32)
    zeros = generator.integers(0, 16, shape).astype(np.float32)
    codes = generator.integers(0, 16, (rows, columns)).astype(np.uint8)
    factors = generator.standard_normal(columns, np.float32)
    first = first % rows
    found = Grid(scales, block_rows, block_columns, zeros, factors=factors).dequantize(codes[first:], first)
    for row in range(first, rows):
        for column in range(columns):
            block = row // block_rows, column // block_columns
            expected = np.float32(codes[row, column] - zeros[block]) * scales[block] * factors[column]
            assert found[row - first, column] == expected


def test_groups_may_be_scattered() -> None:
    grid = Grid(np.array([[1, 10], [100, 1000]], np.float32), 1, 2, groups=np.array([1, 0, 1], np.int32))
    assert grid.dequantize(np.ones((2, 3), np.uint8), 0).tolist() == [[10, 1, 10], [1000, 100, 1000]]


@settings(deadline=None)
@given(rows=SIZES, columns=SIZES, step=SIZES, chunk=st.integers(1, 30), slab=st.integers(1, 400))
def test_rows_and_columns_stream(rows: int, columns: int, step: int, chunk: int, slab: int) -> None:
    values = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    tensor = tensor_of(values, chunk)
    by_rows = [part.copy() for part in stored_rows(tensor, step)]
    assert all(len(part) == step for part in by_rows[:-1] if step < rows)
    np.testing.assert_array_equal(np.concatenate(by_rows), values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "SLAB_BYTES", slab)
        by_columns = [part.copy() for part in stored_columns(tensor, step)]
    np.testing.assert_array_equal(np.concatenate(by_columns), values.T)
    np.testing.assert_array_equal(read_whole(tensor), values)


@pytest.mark.parametrize(
    ("shape", "blocks", "found"),
    [
        ((), [(0, 0)], (6, 8)),
        ((1,), [(0, 0)], (6, 8)),
        ((6,), [(0, 0), (1, 0)], (1, 8)),
        ((6, 1), [(1, 0)], (1, 8)),
        ((2, 3), [(4, 3)], (4, 3)),
        ((2, 1, 3, 1), [(4, 3)], (4, 3)),
        ((6, 2), [(1, 4)], (1, 4)),
    ],
)
def test_the_scales_tell_their_block(
    shape: tuple[int, ...], blocks: list[tuple[int, int]], found: tuple[int, int]
) -> None:
    parts = Parts("layer", {"scale": tensor_of(np.ones(shape, np.float32), 4)})
    assert find_block(parts, "scale", (6, 8), blocks) == found


@pytest.mark.parametrize("shape", [(1, 6), (6, 2), (8,), (2,), (6, 1, 1), (7, 1)])
def test_scales_of_another_number_are_refused(shape: tuple[int, ...]) -> None:
    parts = Parts("layer", {"scale": tensor_of(np.ones(shape, np.float32), 4)})
    with pytest.raises(CheckpointError, match=r"tensor layer.scale has shape \[1, 1\] or \[6, 1\] beside a matrix of"):
        find_block(parts, "scale", (6, 8), [(0, 0), (1, 0)])


def test_every_code_of_float8_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    octets = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(octets).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    grid = Grid(np.ones((1, 1), np.float32), 1, 256)
    found = grid.dequantize(octets.view(ml_dtypes.float8_e4m3fn).reshape(1, 256), 0)[0]
    np.testing.assert_array_equal(found, expected)
    scales = torch.from_numpy(octets[:255]).view(torch.float8_e8m0fnu).to(torch.float32).numpy()
    np.testing.assert_array_equal(octets[:255].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), scales)

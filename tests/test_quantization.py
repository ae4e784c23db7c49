from __future__ import annotations

import doctest
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray

import draftline.quantization
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.quantization import (
    BLOCK,
    TILE,
    multiply_tiles,
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)

# Weights of checkpoints: 0, or of a size that float32 divides without denormals.
values = st.floats(-1e4, 1e4, width=32).map(lambda value: value if abs(value) > 1e-20 else 0.0)
weights = hypothesis_numpy.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 70)), elements=values)


def dequantize_int8(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = (codes.astype(np.float64) - 128) * scales[..., None]
    return values.reshape(len(codes), -1)


def dequantize_int4(
    packed: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """Unpack by arithmetic, not by the shifts of the code under test."""
    out, num_blocks, half = packed.shape
    codes = np.stack([packed % 16, packed // 16], axis=-1).reshape(out, num_blocks, 2 * half)
    zero_points = np.stack([zeros % 16, zeros // 16], axis=-1).reshape(out, -1)[:, :num_blocks]
    values: NDArray[np.float64] = (codes.astype(np.float64) - zero_points[..., None]) * scales[..., None]
    return values.reshape(out, -1)


def dequantize_tiles(
    codes: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8] | None = None
) -> NDArray[np.float64]:
    """Read element by element what the layout says; outputs are padded to whole tiles."""
    num_tiles, num_blocks = scales.shape[:2]
    values = np.empty((num_tiles * TILE, num_blocks * BLOCK))
    for output, column in np.ndindex(values.shape):
        tile, lane, block, place = output // TILE, output % TILE, column // BLOCK, column % BLOCK
        if zeros is None:
            code = int(codes[tile, block, place // 4, lane, place % 4]) - 128
        else:
            byte = int(codes[tile, block, place // 8, lane, place % 4])
            code = (byte % 16 if place % 8 < 4 else byte // 16) - int(zeros[tile, block, lane])
        values[output, column] = code * np.float64(scales[tile, block, lane])
    return values


def padded(weight: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.pad(weight, ((0, 0), (0, -weight.shape[1] % BLOCK))).astype(np.float64)


def per_input(scales: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.repeat(scales.astype(np.float64), BLOCK, axis=1)


def test_examples() -> None:
    assert doctest.testmod(draftline.quantization).failed == 0


@settings(deadline=None)
@given(weights)
def test_int8_is_off_by_half_a_scale_at_most(weight: NDArray[np.float32]) -> None:
    codes, scales = quantize_int8_blocks(weight)
    assert codes.shape == (len(weight), -(-weight.shape[1] // BLOCK), BLOCK)
    assert codes.min() >= 1, "symmetric: no code of -128"
    error = np.abs(dequantize_int8(codes, scales) - padded(weight))
    assert np.all(error <= per_input(scales) * (0.5 + 1e-4))
    assert np.all(codes.reshape(len(weight), -1)[:, weight.shape[1] :] == 128), "padding is zero"


@settings(deadline=None)
@given(weights)
def test_int4_is_off_by_half_a_scale_at_most_and_keeps_zero(weight: NDArray[np.float32]) -> None:
    packed, scales, zeros = quantize_int4_blocks(weight)
    num_blocks = -(-weight.shape[1] // BLOCK)
    assert packed.shape == (len(weight), num_blocks, BLOCK // 2)
    assert zeros.shape == (len(weight), -(-num_blocks // 2))
    restored, original = dequantize_int4(packed, scales, zeros), padded(weight)
    assert np.all(np.abs(restored - original) <= per_input(scales) * (0.5 + 1e-4))
    assert np.all(restored[original == 0] == 0)
    assert np.all(restored[:, weight.shape[1] :] == 0), "padding is zero"


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_grid_survives_int8(rows: int, num_blocks: int, seed: int) -> None:
    """Weights that are codes times a scale come back unchanged, so that quantising twice is quantising once."""
    random = np.random.default_rng(seed)
    codes = random.integers(-127, 128, (rows, num_blocks, BLOCK)).astype(np.float32)
    codes[..., 0] = 127
    scales = 2.0 ** random.integers(-8, 3, (rows, num_blocks, 1))
    weight = (codes * scales).astype(np.float32).reshape(rows, -1)
    np.testing.assert_array_equal(dequantize_int8(*quantize_int8_blocks(weight)), weight)


@settings(deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from(["float32", "float16", "bfloat16"]), st.integers(0, 2**32 - 1)
)
def test_codes_of_four_bits_survive_int4(rows: int, num_blocks: int, dtype: str, seed: int) -> None:
    """Weights that were quantised before come back but for the roundings of their own dtype, and one of float32."""
    random = np.random.default_rng(seed)
    scales = random.uniform(1e-3, 1, (rows, num_blocks, 1)).astype(np.float16).astype(np.float32)
    zeros = random.integers(0, 16, (rows, num_blocks, 1))
    exact = (random.integers(0, 16, (rows, num_blocks, BLOCK)) - zeros) * scales
    weight = exact.reshape(rows, -1).astype(numpy_dtype(dtype)).astype(np.float32)
    restored = dequantize_int4(*quantize_int4_blocks(weight))
    rounding = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(restored, exact.reshape(rows, -1), rtol=rounding, atol=0)


def test_the_least_numbers_of_float32_are_zeros_to_int4() -> None:
    restored = dequantize_int4(*quantize_int4_blocks(np.full((1, BLOCK), 1e-44, np.float32)))
    assert not restored.any()


def test_an_output_without_steps_keeps_the_widest_scale() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 2 * BLOCK)).astype(np.float32)
    weight[3, :BLOCK] = np.rint(weight[3, :BLOCK])  # one block of an output has steps, and the other has not
    blocks = weight.reshape(8, 2, BLOCK)
    widest = (np.maximum(blocks.max(axis=2), 0) - np.minimum(blocks.min(axis=2), 0)) / 15
    _, scales, _ = quantize_int4_blocks(weight)
    assert scales[3, 0] == 1
    widest[3, 0] = 1
    np.testing.assert_allclose(scales, widest, rtol=1e-6)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 96])
def test_blocks_do_not_touch_each_other(size: int) -> None:
    weight = np.random.default_rng(size).standard_normal((5, size)).astype(np.float32)
    together: tuple[NDArray[Any], ...] = (*quantize_int8_blocks(weight), *quantize_int4_blocks(weight))
    alone: tuple[NDArray[Any], ...] = (*quantize_int8_blocks(weight[3:4]), *quantize_int4_blocks(weight[3:4]))
    for part, alone_part in zip(together, alone, strict=True):
        np.testing.assert_array_equal(part[3:4], alone_part)


@settings(deadline=None, max_examples=30)
@given(weights)
def test_tiles_hold_what_blocks_hold(weight: NDArray[np.float32]) -> None:
    for tiles, blocks in (
        (dequantize_tiles(*quantize_int8_tiles(weight)), dequantize_int8(*quantize_int8_blocks(weight))),
        (dequantize_tiles(*quantize_int4_tiles(weight)), dequantize_int4(*quantize_int4_blocks(weight))),
    ):
        assert tiles.shape == (-(-len(weight) // TILE) * TILE, blocks.shape[1])
        np.testing.assert_array_equal(tiles[: len(weight)], blocks)
        assert not tiles[len(weight) :].any(), "padding is zero"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_large_matrices_are_quantised_in_slices(monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    weight = np.random.default_rng(0).standard_normal((70, 50)).astype(dtype)
    whole = (*quantize_int8_tiles(weight), *quantize_int4_tiles(weight))
    monkeypatch.setattr(draftline.quantization, "_SLICE_VALUES", 2 * TILE * 50)
    for part, expected in zip((*quantize_int8_tiles(weight), *quantize_int4_tiles(weight)), whole, strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("quantize", [quantize_int8_tiles, quantize_int4_tiles])
def test_the_product_of_tiles_is_that_of_the_matrix(quantize: Callable[..., tuple[NDArray[Any], ...]]) -> None:
    random = np.random.default_rng(0)
    weight, x = (random.standard_normal((size, 70)).astype(np.float32) for size in (20, 5))
    tensors = quantize(weight)
    expected = x @ dequantize_tiles(*tensors)[:, :70].T
    # Inputs are off by half a step, 1/254 of the largest of a block (3 at most): 0.3 over the 70 of a row, as a sum of
    # random signs. A misread block is off by order 8.
    np.testing.assert_allclose(multiply_tiles(x, *tensors), expected, rtol=0, atol=0.3)


def _nearest_float32(value: Fraction) -> np.float32:
    """The float32 nearest to `value`, ties to the even one; not by way of float64, which would round twice."""
    about = np.float32(float(value))
    near = [np.nextafter(about, np.float32(-np.inf)), about, np.nextafter(about, np.float32(np.inf))]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(np.uint32)) & 1))


@settings(deadline=None)
@given(hypothesis_numpy.arrays(np.float32, (3, 20), elements=st.floats(-(2.0**60), 2.0**60, width=32)))
@example(np.array([[-6.5416664e16], [5.0], [5.0]], np.float32))  # float64 rounds it to a tie of float32
@example(np.array([[1 + 2**-12], [1 + 2**-12], [2**-60]], np.float32))
def test_fused_products_are_rounded_once(values: NDArray[np.float32]) -> None:
    expected = [_nearest_float32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) for a, b, c in values.T]
    np.testing.assert_array_equal(draftline.quantization._fma(*values), np.array(expected))

from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray

import draftline.quantization
from draftline.quantization import BLOCK, quantize_int4_blocks, quantize_int8_blocks

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


@pytest.mark.parametrize("size", [1, 31, 32, 33, 96])
def test_blocks_do_not_touch_each_other(size: int) -> None:
    weight = np.random.default_rng(size).standard_normal((5, size)).astype(np.float32)
    together: tuple[NDArray[Any], ...] = (*quantize_int8_blocks(weight), *quantize_int4_blocks(weight))
    alone: tuple[NDArray[Any], ...] = (*quantize_int8_blocks(weight[3:4]), *quantize_int4_blocks(weight[3:4]))
    for part, alone_part in zip(together, alone, strict=True):
        np.testing.assert_array_equal(part[3:4], alone_part)

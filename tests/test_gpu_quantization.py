"""Weights in the forms of GPUs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.gpu_quantization import (
    SIGNED_BLOCK,
    dequantize_float8,
    dequantize_int4_signed,
    quantize_float8,
    quantize_int4_signed,
)

DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@given(st.integers(1, 5), st.integers(1, 3), DTYPES, st.integers(0, 99))
def test_signed_codes_are_off_by_half_a_scale(out: int, num_blocks: int, dtype: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((out, num_blocks * SIGNED_BLOCK)).astype(numpy_dtype(dtype))
    weight[0, :SIGNED_BLOCK] = 0
    packed, scales = quantize_int4_signed(weight)
    assert (packed.shape, scales.shape, scales.dtype) == ((out, weight.shape[1] // 2), (out, num_blocks), weight.dtype)
    signed = packed.view(np.int8)
    codes = np.stack([np.left_shift(signed, 4) >> 4, signed >> 4], axis=-1).reshape(weight.shape)
    wide = np.repeat(scales.astype(np.float32), SIGNED_BLOCK, axis=1)
    assert np.abs(codes).max() <= 7
    # A scale that was rounded down leaves the largest weight up to 7 roundings of it outside.
    assert (np.abs(codes * wide - weight.astype(np.float32)) <= wide * (0.5 + 7 * 2.0**-8)).all()
    assert not codes[0, :SIGNED_BLOCK].any()
    np.testing.assert_array_equal(dequantize_int4_signed(packed, scales), codes * wide)


@given(st.integers(1, 5), st.integers(1, 40), DTYPES, st.floats(-12, 4), st.integers(0, 99))
@example(1, 1, "float16", -12.0, 0)  # scales that float16 holds with few bits
def test_float8_is_the_nearest_number_times_the_scale(
    out: int, size: int, dtype: str, exponent: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((out, size)) * 2.0**exponent).astype(numpy_dtype(dtype))
    weight[0] = 0
    codes, scales = quantize_float8(weight)
    assert (codes.shape, scales.shape, scales.dtype) == (weight.shape, (out,), weight.dtype)
    numbers = np.sort(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    numbers = numbers[np.isfinite(numbers)]
    scaled = weight.astype(np.float64) / scales.astype(np.float64)[:, None]
    distance = np.abs(scaled[..., None] - numbers).min(axis=-1)
    found = dequantize_float8(codes, scales).astype(np.float64) / scales.astype(np.float64)[:, None]
    np.testing.assert_allclose(np.abs(found - scaled), distance, rtol=1e-5, atol=1e-4)  # of 448
    assert not codes[0].any()
    assert scales[0] == 1
    mantissas, _ = np.frexp(scales.astype(np.float64))
    assert (mantissas == 0.5).all()
    exact = dequantize_float8(codes, scales)
    if np.abs(exact[exact != 0]).min(initial=1) >= 2.0**-20:  # below, float16 has fewer bits than float8
        np.testing.assert_array_equal(exact.astype(weight.dtype).astype(np.float32), exact)


def test_least_weights_of_float16_have_the_least_scale() -> None:
    codes, scales = quantize_float8(np.array([[6e-8, 0.0], [2.6e-5, -2.6e-5]], np.float16))
    assert scales.tolist() == [2.0**-24, 2.0**-24]
    np.testing.assert_array_equal(dequantize_float8(codes, scales), [[2.0**-24, 0], [448 * 2.0**-24, -448 * 2.0**-24]])

"""Weight quantisation for GPUs: codes and scales as ONNX's DequantizeLinear, and TensorRT's, multiply them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from draftline.quantization import pack_pairs

SIGNED_BLOCK = 64  # inputs that share a scale of int4
LEAST_EXPONENT = -24  # of a scale: the least number of float16
FLOAT8_MAX = np.float32(448)  # E4M3 has no infinity; what is larger is NaN


def quantize_int4_signed(weight: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Quantise blocks of ``SIGNED_BLOCK`` inputs symmetrically to -7 .. 7, as TensorRT and ONNX's INT4 have them.

    Shapes: ``weight [out, in]`` of any float dtype, ``in`` a multiple of ``SIGNED_BLOCK`` -> ``packed [out, in / 2]
    uint8`` (two's complement, even inputs in the low half-byte), ``scales [out, in / SIGNED_BLOCK]`` of the weight's
    dtype; ``weight ~ code * scale``. A block of zeros, or of what is 0 beside the dtype's least number, has scale 1.
    """
    out, size = weight.shape
    assert size % SIGNED_BLOCK == 0, "who calls has checked"
    blocks = weight.astype(np.float32).reshape(out, size // SIGNED_BLOCK, SIGNED_BLOCK)
    scales = (np.abs(blocks).max(axis=2) / np.float32(7)).astype(weight.dtype)
    scales = np.where(scales > 0, scales, np.ones_like(scales))
    rounded = np.clip(np.rint(blocks / scales.astype(np.float32)[..., None]), -7, 7).reshape(out, size)
    codes: NDArray[np.uint8] = rounded.astype(np.int8).view(np.uint8) & np.uint8(15)
    return pack_pairs(codes), scales


def dequantize_int4_signed(packed: NDArray[np.uint8], scales: NDArray[Any]) -> NDArray[np.float32]:
    """Return the matrix ``[out, in]`` that ``quantize_int4_signed`` rounded to.

    >>> weight = np.linspace(-7, 7, 128, dtype=np.float32).reshape(1, 128)
    >>> bool(np.abs(dequantize_int4_signed(*quantize_int4_signed(weight)) - weight).max() <= 0.5)
    True
    """
    signed = packed.view(np.int8)
    codes = np.stack([np.left_shift(signed, 4) >> 4, signed >> 4], axis=-1).reshape(len(packed), -1)
    matrix: NDArray[np.float32] = codes.astype(np.float32) * np.repeat(scales.astype(np.float32), SIGNED_BLOCK, axis=1)
    return matrix


def quantize_float8(weight: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Round to float8 (E4M3, no infinity), each output over the least power of two that leaves its weights below 448.

    A power of two costs no precision, as float8 has as many bits for small numbers as for large ones, and the product
    of a number and its scale is exact in 16 bits, whoever multiplies.

    Source: the format E4M3 of FP8 Formats for Deep Learning (arXiv 2209.05433), ONNX's FLOAT8E4M3FN.

    Shapes: ``weight [out, in]`` of any float dtype -> ``codes [out, in] uint8``, the bits of the numbers, and ``scales
    [out]`` of the weight's dtype; ``weight ~ number * scale``, to nearest, ties to even. An output of zeros has 1.

    >>> codes, scales = quantize_float8(np.array([[896.0, -112.0, 2.0], [0.0, 0.0, 0.0]], np.float32))
    >>> codes.tolist(), scales.tolist()
    ([[126, 230, 56], [0, 0, 0]], [2.0, 1.0])
    """
    wide = weight.astype(np.float32)
    mantissas, exponents = np.frexp(np.abs(wide).max(axis=1) / FLOAT8_MAX)  # mantissas of 0.5 to 1
    least = np.maximum(exponents - (mantissas == 0.5), LEAST_EXPONENT)
    scales = np.where(mantissas == 0, np.float32(1), np.ldexp(np.float32(1), least)).astype(weight.dtype)
    scaled = np.clip(wide / scales.astype(np.float32)[:, None], -FLOAT8_MAX, FLOAT8_MAX)
    return scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales


def dequantize_float8(codes: NDArray[np.uint8], scales: NDArray[Any]) -> NDArray[np.float32]:
    """Return the matrix ``[out, in]`` that ``quantize_float8`` rounded to."""
    numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    matrix: NDArray[np.float32] = numbers * scales.astype(np.float32)[:, None]
    return matrix

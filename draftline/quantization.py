"""Weight quantisation: int8 with one scale per output row, int4 with scale and zero point per block of inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

INT4_BLOCK = 32


def quantize_int8_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise each row symmetrically to -127 .. 127.

    Shapes: ``weight [out, in]`` -> ``int8 [out, in]``, ``scales [out] float32``; ``weight ~ int8 * scales[:, None]``, off
    by half a scale at most. A row of zeros has scale 1.

    >>> values, scales = quantize_int8_rows(np.array([[1.27, -0.5], [0.0, 0.0]], np.float32))
    >>> values.tolist(), scales.round(4).tolist()
    ([[127, -50], [0, 0]], [0.01, 1.0])
    """
    largest = np.abs(weight).max(axis=1)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return np.rint(weight / scales[:, None]).astype(np.int8), scales


def quantize_int4_blocks(
    weight: NDArray[np.float32], block: int = INT4_BLOCK
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantise blocks of ``block`` inputs to 0 .. 15 with a zero point, in the layout of ONNX Runtime's ``MatMulNBits``.

    Shapes: ``weight [out, in]``, n = ceil(in / block) -> ``packed [out, n, block / 2] uint8`` (even inputs in the low
    half-byte), ``scales [out, n] float32``, ``zero_points [out, ceil(n / 2)] uint8`` (even blocks in the low half-byte);
    ``weight ~ (q - zero_point) * scale``, off by one scale at most. Inputs beyond ``in`` are padded with zeros.

    >>> packed, scales, zero_points = quantize_int4_blocks(np.array([[-1.0, 0.0, 1.0, 2.0]], np.float32), block=4)
    >>> packed.tolist(), scales.round(4).tolist(), zero_points.tolist()
    ([[[80, 250]]], [[0.2]], [[5]])
    """
    out, size = weight.shape
    num_blocks = -(-size // block)
    padded = np.zeros((out, num_blocks * block), np.float32)
    padded[:, :size] = weight
    blocks = padded.reshape(out, num_blocks, block)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scales = np.where(high > low, (high - low) / np.float32(15), np.float32(1)).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.uint8)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    even_zeros = np.full((out, num_blocks + num_blocks % 2), 0, np.uint8)
    even_zeros[:, :num_blocks] = zeros
    return packed, scales, even_zeros[:, 0::2] | (even_zeros[:, 1::2] << 4)

"""Weight quantisation in blocks of inputs, in the layout of ONNX Runtime's ``MatMulNBits``: int8 and int4."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # inputs that share a scale


def quantize_int8_blocks(
    weight: NDArray[np.float32], block: int = BLOCK
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise blocks of ``block`` inputs symmetrically to -127 .. 127, stored as 1 .. 255 around 128.

    Shapes: ``weight [out, in]``, n = ceil(in / block) -> ``codes [out, n, block] uint8``, ``scales [out, n] float32``;
    ``weight ~ (code - 128) * scale``, off by half a scale at most. A block of zeros has scale 1. Inputs beyond ``in``
    are padded with zeros.

    >>> codes, scales = quantize_int8_blocks(np.array([[63.5, -25.0, 0.0, 0.0]], np.float32), block=2)
    >>> codes.tolist(), scales.tolist()
    ([[[255, 78], [128, 128]]], [[0.5, 1.0]])
    """
    blocks = _split_blocks(weight, block)
    largest = np.abs(blocks).max(axis=2)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    return (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8), scales


def quantize_int4_blocks(
    weight: NDArray[np.float32], block: int = BLOCK
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantise blocks of ``block`` inputs to 0 .. 15 with a zero point.

    Shapes: ``weight [out, in]``, n = ceil(in / block) -> ``packed [out, n, block / 2] uint8`` (even inputs in the low
    half-byte), ``scales [out, n] float32``, ``zero_points [out, ceil(n / 2)] uint8`` (even blocks in the low
    half-byte); ``weight ~ (code - zero_point) * scale``, off by half a scale at most. Inputs beyond ``in`` are padded
    with zeros.

    >>> packed, scales, zero_points = quantize_int4_blocks(np.array([[-2.5, 0.0, 2.5, 5.0]], np.float32), block=4)
    >>> packed.tolist(), scales.tolist(), zero_points.tolist()
    ([[[80, 250]]], [[0.5]], [[5]])
    """
    blocks = _split_blocks(weight, block)
    out, num_blocks, _ = blocks.shape
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scales = np.where(high > low, (high - low) / np.float32(15), np.float32(1)).astype(np.float32)
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.uint8)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, 15).astype(np.uint8)
    packed = _pack_pairs(codes)
    even_zeros = np.full((out, num_blocks + num_blocks % 2), 0, np.uint8)
    even_zeros[:, :num_blocks] = zeros
    return packed, scales, _pack_pairs(even_zeros)


def _split_blocks(weight: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    out, size = weight.shape
    num_blocks = -(-size // block)
    padded = np.zeros((out, num_blocks * block), np.float32)
    padded[:, :size] = weight
    return padded.reshape(out, num_blocks, block)


def _pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack pairs of half-bytes along the last axis, the even one low."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)

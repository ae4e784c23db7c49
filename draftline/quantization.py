"""Weight quantisation in blocks of inputs, int8 and int4, in two layouts; and the product that native kernels form.

``quantize_*_blocks`` write the layout of ONNX Runtime's ``MatMulNBits``, ``quantize_*_tiles`` the same values in that
of the native ``QuantizedMatMul`` (``plugins/quantized_matmul/README.md``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # inputs that share a scale
TILE = 16  # outputs that stand side by side
LEAST = np.float32(1e-30)  # a block of smaller inputs, or of weights to 4 bits, counts as zeros
STEPS = 15  # of int4: from the lowest code to the highest
_ROUNDED = 0.008  # by how much of itself a weight leaves its step where both ends were rounded to bfloat16, 2 ** -7
_SAMPLE = 8  # inputs that tell whether the others are worth a look; almost none lie on steps by chance
_SLICE_VALUES = 1 << 20  # weights in tiles at a time, so that what quantising needs beside the result stays small


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

    A block that lies on 16 steps of some scale keeps it: weights that were quantised to 4 bits before, in groups that
    are whole blocks, come out as they are, up to one rounding of float32.

    >>> packed, scales, zero_points = quantize_int4_blocks(np.array([[-2.5, 0.0, 2.0, 5.0]], np.float32), block=4)
    >>> packed.tolist(), scales.tolist(), zero_points.tolist()
    ([[[80, 249]]], [[0.5]], [[5]])
    >>> packed, scales, zero_points = quantize_int4_blocks(np.array([[-7.5, 0.0, 2.5, 5.0]], np.float32), block=4)
    >>> packed.tolist(), scales.tolist(), zero_points.tolist()
    ([[[48, 84]]], [[2.5]], [[3]])
    """
    codes, scales, zeros = _int4_codes(_split_blocks(weight, block))
    out, num_blocks = scales.shape
    even_zeros = np.full((out, num_blocks + num_blocks % 2), 0, np.uint8)
    even_zeros[:, :num_blocks] = zeros
    return pack_pairs(codes), scales, pack_pairs(even_zeros)


def quantize_int8_tiles(weight: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantise as ``quantize_int8_blocks``, in tiles.

    Shapes: ``weight [out, in]`` of any float dtype, n = ceil(in / 32), m = ceil(out / 16) -> ``codes [m, n, 8, 16, 4]
    uint8``, ``scales [m, n, 16] float32``. ``codes[t, b, i, o, j]`` is that of output ``16 t + o`` and input ``32 b + 4
    i + j``. Outputs beyond ``out`` are padded with zeros.
    """
    num_tiles, num_blocks = _num_tiles(weight), -(-weight.shape[1] // BLOCK)
    codes = np.empty((num_tiles, num_blocks, 8, TILE, 4), np.uint8)
    scales = np.empty((num_tiles, num_blocks, TILE), np.float32)

    def quantize(tiles: slice, rows: NDArray[np.float32]) -> None:
        row_codes, row_scales = quantize_int8_blocks(rows)
        codes[tiles], scales[tiles] = _codes_in_tiles(row_codes), _in_tiles(row_scales)

    _by_slices(weight, quantize)
    return codes, scales


def quantize_int4_tiles(
    weight: NDArray[Any],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """Quantise as ``quantize_int4_blocks``, in tiles.

    Shapes as of ``quantize_int8_tiles``, but two codes stand in a byte: ``packed [m, n, 4, 16, 4] uint8``, where
    ``packed[t, b, i, o, j]`` holds the code of input ``32 b + 8 i + j`` in its low half-byte and that of the fourth
    input after it in the high one; ``scales [m, n, 16] float32``; ``zero_points [m, n, 16] uint8``.
    """
    num_tiles, num_blocks = _num_tiles(weight), -(-weight.shape[1] // BLOCK)
    packed = np.empty((num_tiles, num_blocks, 4, TILE, 4), np.uint8)
    scales = np.empty((num_tiles, num_blocks, TILE), np.float32)
    zeros = np.empty((num_tiles, num_blocks, TILE), np.uint8)

    def quantize(tiles: slice, rows: NDArray[np.float32]) -> None:
        row_codes, row_scales, row_zeros = _int4_codes(_split_blocks(rows, BLOCK))
        scales[tiles], zeros[tiles] = _in_tiles(row_scales), _in_tiles(row_zeros)
        codes = _codes_in_tiles(row_codes)
        packed[tiles] = codes[:, :, 0::2] | codes[:, :, 1::2] << np.uint8(4)

    _by_slices(weight, quantize)
    return packed, scales, zeros


def multiply_tiles(
    x: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """Multiply as the native ``QuantizedMatMul`` does, to the last bit: its oracle, slow.

    Shapes: ``x [T, in]``; the others as ``quantize_int8_tiles`` or, with ``zero_points``,
    ``quantize_int4_tiles`` return them -> ``[T, 16 m] float32``.

    Numerics: ``plugins/quantized_matmul/README.md``. Inputs are quantised by block of a row, sums within a block are
    those of integers, and blocks are added in order by fused products of float32. A row with an infinite input or a NaN
    is NaN throughout.
    """
    is_finite = np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(is_finite, x, np.float32(0))
    num_blocks = codes.shape[1]
    if zero_points is None:
        weights = codes.astype(np.int64) - 128
    else:
        weights = np.stack([codes & 15, codes >> 4], axis=3).reshape(-1, num_blocks, 8, TILE, 4).astype(np.int64)
        weights -= zero_points[:, :, None, :, None]
    blocks = _split_blocks(x, BLOCK)
    largest = np.abs(blocks).max(axis=2)
    counts = largest >= LEAST
    divisor = np.where(counts, largest, np.float32(1))
    inputs = np.rint(blocks * np.where(counts, np.float32(127) / divisor, np.float32(0))[..., None]).astype(np.int64)
    input_scales = np.where(counts, largest / np.float32(127), np.float32(0))
    y = np.zeros((len(x), codes.shape[0] * TILE), np.float32)
    for block in range(num_blocks):
        dots = np.einsum("rij,tioj->rto", inputs[:, block].reshape(-1, 8, 4), weights[:, block]).reshape(y.shape)
        y = _fma(dots.astype(np.float32), input_scales[:, block, None] * scales[:, block].reshape(-1), y)
    return np.where(is_finite, y, np.float32(np.nan))


def _fma(a: NDArray[np.float32], b: NDArray[np.float32], c: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``a * b + c``, rounded once. The product is exact in float64, and the sum is rounded to odd there."""
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    is_even = total.view(np.int64) % 2 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    rounded: NDArray[np.float64] = np.where((error != 0) & is_even, odd, total)
    return rounded.astype(np.float32)


def _num_tiles(weight: NDArray[Any]) -> int:
    return -(-weight.shape[0] // TILE)


def _by_slices(weight: NDArray[Any], quantize: Callable[[slice, NDArray[np.float32]], None]) -> None:
    """Call ``quantize`` with tiles and their rows, the last one padded with zeros."""
    num_tiles, size = _num_tiles(weight), weight.shape[1]
    step = max(1, _SLICE_VALUES // (TILE * size))
    for first in range(0, num_tiles, step):
        end = min(first + step, num_tiles)
        rows = weight[first * TILE : end * TILE].astype(np.float32)
        padding = (end - first) * TILE - len(rows)
        quantize(slice(first, end), np.pad(rows, ((0, padding), (0, 0))) if padding else rows)


def _codes_in_tiles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Lay ``codes [out, n, 32]`` out as ``[m, n, 8, 16, 4]``; four of them move as one word."""
    words = np.ascontiguousarray(codes).view(np.uint32)
    tiles = words.reshape(-1, TILE, *words.shape[1:]).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(tiles)[..., None].view(np.uint8)


def _in_tiles(values: NDArray[Any]) -> NDArray[Any]:
    """Lay ``values [out, n]`` out as ``[m, n, 16]``."""
    return values.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1)


def _int4_codes(
    blocks: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scales = np.where(high - low > LEAST, (high - low) / np.float32(STEPS), np.float32(1)).astype(np.float32)
    has_steps = _find_steps(blocks[:, 0, :_SAMPLE]) > 0
    if has_steps.any():
        steps = _find_steps(blocks[has_steps])
        scales[has_steps] = np.where(steps > 0, steps, scales[has_steps])
    zeros = np.clip(np.rint(-low / scales), 0, STEPS).astype(np.uint8)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, STEPS).astype(np.uint8)
    return codes, scales, zeros


def _find_steps(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return of ``blocks [..., n]`` the largest step whose whole multiples their values are, 1 of zeros.

    0 where there is none that reaches from the lowest value to the highest, 0 among them, in ``STEPS``.
    """
    largest = np.abs(blocks).max(axis=-1)
    found = np.where(largest > LEAST, np.float32(0), np.float32(1))
    for count in range(1, STEPS + 1):  # of steps to the largest value
        places = np.nonzero(found == 0)
        for width in (_SAMPLE, blocks.shape[-1]):
            values = blocks[places][..., :width]
            multiples = values * (np.float32(count) / largest[places])[..., None]
            whole = np.rint(multiples)
            fits = (np.abs(multiples - whole) <= _ROUNDED * np.abs(whole)).all(axis=-1)
            fits &= np.maximum(whole.max(axis=-1), 0) - np.minimum(whole.min(axis=-1), 0) <= STEPS
            places = tuple(place[fits] for place in places)
        values, whole = values[fits].astype(np.float64), whole[fits]
        found[places] = (values * whole).sum(axis=-1) / (whole * whole).sum(axis=-1)  # by least squares
    return found


def _split_blocks(weight: NDArray[np.float32], block: int) -> NDArray[np.float32]:
    out, size = weight.shape
    num_blocks = -(-size // block)
    padded = np.zeros((out, num_blocks * block), np.float32)
    padded[:, :size] = weight
    return padded.reshape(out, num_blocks, block)


def pack_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack pairs of half-bytes along the last axis, the even one low."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)

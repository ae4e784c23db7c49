"""Matrices as quantisers store them: packed code by code, from the definitions of the formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Packed(NamedTuple):
    """What is stored of a matrix, by the last word of its tensors' names, and the weights that it stands for."""

    parts: dict[str, NDArray[Any]]
    weights: NDArray[np.float32]


Pack = Callable[[NDArray[np.float32]], Packed]


class Rounded(NamedTuple):
    """``codes [out, in]`` from 0 on, ``zeros`` and ``scales [out, groups]``, ``weights [out, in]``."""

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[Any]
    weights: NDArray[np.float32]


def round_groups(
    weight: NDArray[np.float32], bits: int, groups: NDArray[np.int64], symmetric: bool, dtype: Any = np.float16
) -> Rounded:
    """Round each group of inputs of each output to the nearest code; zero points are 1 at least."""
    out, num_groups, top = len(weight), int(groups.max()) + 1, 2**bits - 1
    codes, zeros = np.zeros(weight.shape, np.int64), np.zeros((out, num_groups), np.int64)
    scales, weights = np.zeros((out, num_groups), dtype), np.zeros(weight.shape, np.float32)
    for group in range(num_groups):
        inputs = np.flatnonzero(groups == group)
        values = weight[:, inputs]
        low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
        if symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = np.maximum((high - low) / top, 1e-6).astype(dtype)
        wide = scale.astype(np.float32)
        zero = np.full(out, (top + 1) // 2) if symmetric else np.clip(np.rint(-low / wide), 1, top).astype(np.int64)
        code = np.clip(np.rint(values / wide[:, None]) + zero[:, None], 0, top).astype(np.int64)
        codes[:, inputs], zeros[:, group], scales[:, group] = code, zero, scale
        weights[:, inputs] = (code - zero[:, None]).astype(np.float32) * wide[:, None]
    return Rounded(codes, zeros, scales, weights)


def side_by_side(num_inputs: int, group_size: int) -> NDArray[np.int64]:
    return np.arange(num_inputs) // (group_size if group_size > 0 else num_inputs)


def pack_string(codes: NDArray[np.int64], bits: int) -> NDArray[np.int32]:
    """Pack ``codes [n]`` one after the other into words of 32 bits, the least significant bit first."""
    string = (codes[:, None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8) & 1).reshape(-1)
    padded = np.pad(string, (0, -len(string) % 32))
    return np.packbits(padded, bitorder="little").view("<i4")


def gptq_packing(
    bits: int = 4,
    group_size: int = 32,
    *,
    version: int = 1,
    symmetric: bool = True,
    act_order: bool = False,
    with_groups: bool = True,
    dtype: Any = np.float16,
) -> Pack:
    def pack(weight: NDArray[np.float32]) -> Packed:
        groups = side_by_side(weight.shape[1], group_size)
        if act_order:
            groups = np.random.default_rng(weight.shape[0]).permutation(groups)
        rounded = round_groups(weight, bits, groups, symmetric, dtype)
        stored_zeros = rounded.zeros - (1 if version == 1 else 0)
        parts: dict[str, NDArray[Any]] = {
            "qweight": np.stack([pack_string(row, bits) for row in rounded.codes], axis=1),
            "qzeros": np.stack([pack_string(column, bits) for column in stored_zeros.T]),
            "scales": np.ascontiguousarray(rounded.scales.T),
        }
        if with_groups:
            parts["g_idx"] = groups.astype(np.int32)
        return Packed(parts, rounded.weights)

    return pack


def awq_packing(group_size: int = 32, *, symmetric: bool = False) -> Pack:
    def pack(weight: NDArray[np.float32]) -> Packed:
        rounded = round_groups(weight, 4, side_by_side(weight.shape[1], group_size), symmetric)

        def words(codes: NDArray[np.int64]) -> NDArray[np.int32]:
            """[out, n] -> [n, out / 8]"""
            packed = np.zeros((codes.shape[1], codes.shape[0] // 8), np.uint32)
            for place, output in enumerate(AWQ_ORDER):
                packed |= codes[output::8].T.astype(np.uint32) << np.uint32(4 * place)
            return packed.view(np.int32)

        scales = np.ascontiguousarray(rounded.scales.T)
        return Packed(
            {"qweight": words(rounded.codes), "qzeros": words(rounded.zeros), "scales": scales}, rounded.weights
        )

    return pack


def float8_packing(
    block: tuple[int, int],
    scale_name: str = "weight_scale",
    *,
    scale_dtype: Any = np.float32,
    squeeze: bool = False,
    extra: dict[str, NDArray[Any]] | None = None,
    factors: bool = False,
) -> Pack:
    """``block``: rows and columns that share a scale, 0 = all of them. ``squeeze``: one scale is stored as a scalar."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        rows, columns = (size or whole for size, whole in zip(block, weight.shape, strict=True))
        grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        before = _factors(weight.shape[1]) if factors else np.ones(weight.shape[1], np.float32)
        divided, scales = weight / before, np.zeros(grid, scale_dtype)
        codes, values = np.zeros(weight.shape, FLOAT8), np.zeros(weight.shape, np.float32)
        for row, column in np.ndindex(grid):
            part = np.s_[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            scales[row, column] = np.abs(divided[part]).max() / FLOAT8_MAX
            scale = np.float32(scales[row, column])
            codes[part] = np.clip(divided[part] / scale, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)
            values[part] = codes[part].astype(np.float32) * scale
        parts: dict[str, NDArray[Any]] = {"weight": codes, scale_name: scales.reshape(()) if squeeze else scales}
        if factors:
            parts["pre_quant_scale"] = before
            values *= before
        return Packed(parts | (extra or {}), values)

    return pack


def _factors(num_inputs: int) -> NDArray[np.float32]:
    factors: NDArray[np.float32] = np.exp(np.random.default_rng(num_inputs).standard_normal(num_inputs, np.float32) / 4)
    return factors


def compressed_packing(
    bits: int, group_size: int, *, symmetric: bool = True, act_order: bool = False, dtype: Any = ml_dtypes.bfloat16
) -> Pack:
    """compressed-tensors' pack-quantized: codes and zero points are stored as offsets from the smallest."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        groups = side_by_side(weight.shape[1], group_size)
        if act_order:
            groups = np.random.default_rng(weight.shape[0]).permutation(groups)
        rounded = round_groups(weight, bits, groups, symmetric, dtype)
        parts: dict[str, NDArray[Any]] = {
            "weight_packed": np.stack([pack_string(row, bits) for row in rounded.codes]),
            "weight_shape": np.array(weight.shape, np.int64),
            "weight_scale": rounded.scales,
        }
        if not symmetric:
            columns = [pack_string(column, bits) for column in rounded.zeros.T]
            parts["weight_zero_point"] = np.ascontiguousarray(np.stack(columns, axis=1))
        if act_order:
            parts["weight_g_idx"] = groups.astype(np.int32)
        return Packed(parts, rounded.weights)

    return pack


def int8_packing(*, symmetric: bool = True, smooth: bool = False, vector: bool = False) -> Pack:
    """int8 as it is, a scale for each output; ``vector``: in one dimension, as ModelOpt stores it."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        before = _factors(weight.shape[1]) if smooth else np.ones(weight.shape[1], np.float32)
        groups = side_by_side(weight.shape[1], 0)
        rounded = round_groups((weight / before).astype(np.float32), 8, groups, symmetric, np.float32)
        scales = rounded.scales[:, 0] if vector else rounded.scales
        parts: dict[str, NDArray[Any]] = {"weight": (rounded.codes - 128).astype(np.int8), "weight_scale": scales}
        if not symmetric:
            parts["weight_zero_point"] = (rounded.zeros - 128).astype(np.int8)
        if smooth:
            parts["pre_quant_scale"] = before
        return Packed(parts, rounded.weights * before)

    return pack


def modelopt_int4_packing(group_size: int = 32, *, smooth: bool = True) -> Pack:
    """Codes from -8 to 7, those of two outputs in a byte, the first one low."""

    def pack(weight: NDArray[np.float32]) -> Packed:
        before = _factors(weight.shape[1]) if smooth else np.ones(weight.shape[1], np.float32)
        groups = side_by_side(weight.shape[1], group_size)
        rounded = round_groups((weight / before).astype(np.float32), 4, groups, True, np.float32)
        signed = rounded.codes - 8
        packed = (signed[0::2] & 15 | (signed[1::2] & 15) << 4).astype(np.uint8)
        parts: dict[str, NDArray[Any]] = {"weight": packed, "weight_scale": rounded.scales}
        if smooth:
            parts["pre_quant_scale"] = before
        return Packed(parts, rounded.weights * before)

    return pack


def float4_packing(group_size: int = 16, *, compressed: bool = False) -> Pack:
    """NVFP4: codes of E2M1, those of two inputs in a byte, the first one low; scales in float8, and one for them.

    ``compressed``: as compressed-tensors stores it, which divides by the one scale.
    """

    def pack(weight: NDArray[np.float32]) -> Packed:
        common = np.float32(np.abs(weight).max() / (6 * FLOAT8_MAX))
        divisor = np.float32(1 / common)
        num_groups = weight.shape[1] // group_size
        scales = np.zeros((len(weight), num_groups), FLOAT8)
        packed, values = np.zeros((len(weight), weight.shape[1] // 2), np.uint8), np.zeros(weight.shape, np.float32)
        for row, group in np.ndindex(scales.shape):
            inputs = range(group * group_size, (group + 1) * group_size)
            largest = np.abs(weight[row, inputs.start : inputs.stop]).max()
            scales[row, group] = max(largest / 6 / common, 2**-6)
            scale = np.float32(scales[row, group]) / divisor if compressed else np.float32(scales[row, group]) * common
            for column in inputs:
                size = abs(weight[row, column]) / scale
                code = min(range(8), key=lambda index: abs(FLOAT4[index] - size))
                sign = -1 if weight[row, column] < 0 else 1
                values[row, column] = np.float32(sign * FLOAT4[code]) * scale
                packed[row, column // 2] |= (code | (8 if sign < 0 else 0)) << 4 * (column % 2)
        parts: dict[str, NDArray[Any]]
        if compressed:
            parts = {"weight_packed": packed, "weight_global_scale": np.array([divisor], np.float32)}
        else:
            parts = {"weight": packed, "weight_scale_2": np.array(common, np.float32)}
        return Packed(parts | {"weight_scale": scales}, values)

    return pack

"""The layouts of compressed-tensors, which llm-compressor writes: float8, float4, int8, packed integers.

Source: the compressors and ``QuantizationArgs`` of compressed-tensors. ``weight_packed [out, ceil(in bits / 32)]``
holds codes as offsets from the smallest, ``-2 ** (bits - 1)``, and so do zero points, which are packed along the
outputs, or stored as int8 where they are not packed. ``weight_g_idx`` is -1 throughout where it is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.float4 import open_float4
from draftline.checkpoints.quantized.float8 import ACTIVATIONS, KEYS_AND_VALUES
from draftline.checkpoints.quantized.grid import WHOLE, Grid, find_block, matrix_tensor, read_grid
from draftline.checkpoints.quantized.layout import CACHE_NOTE, WEIGHT, Layout
from draftline.checkpoints.quantized.packing import num_words, unpack_words
from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts
from draftline.checkpoints.quantized.scaled import FLOAT8, INT8, SCALE_DTYPES, open_scaled
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor

PACKED, SHAPE, SCALE, ZEROS, GROUPS = (
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_zero_point",
    "weight_g_idx",
)
COMMON = "weight_global_scale"  # of float4: scales are divided by it
FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
)


@dataclass(frozen=True)
class Group:
    """What one of ``config_groups`` says of its weights; ``block``: rows and columns that share a scale."""

    kind: str  # float | int
    bits: int
    block: tuple[int, int]

    def __str__(self) -> str:
        rows, columns = self.block
        scale = {(WHOLE, WHOLE): "matrix", (1, WHOLE): "output"}.get(
            self.block, f"{columns} inputs" if rows == 1 else f"{rows} x {columns} weights"
        )
        return f"{self.kind}{self.bits}, a scale for each {scale}"


def compressed_tensors_layout(config: JsonObject) -> Layout:
    """Read the configuration. Raises: CheckpointError where the format is another, or the network is changed."""
    groups = tuple(_groups(config))
    if not groups:
        rule = "an object of groups with weights"
        raise config.error("config_groups", rule, config.get("config_groups"), USE_ORIGINAL)
    for key in ("sparsity_config", "transform_config"):
        found = config.section(key)
        if found is not None and found.values and found.get("format") != "dense":
            raise config.error(key, "absent or empty", found.values, USE_ORIGINAL)
    return Layout(
        title=f"compressed-tensors, {' and '.join(dict.fromkeys(map(str, groups)))}",
        parts=frozenset((WEIGHT, PACKED, SHAPE, SCALE, COMMON, ZEROS, GROUPS)),
        unused=ACTIVATIONS | KEYS_AND_VALUES | {"input_zero_point", "output_zero_point", "input_global_scale"},
        open_matrix=partial(_open_matrix, groups),
        notes=(CACHE_NOTE,) if config.get("kv_cache_scheme") else (),
    )


def _groups(config: JsonObject) -> Iterator[Group]:
    _check_format(config, config.get("format"))
    groups = config.section("config_groups") or JsonObject(config.where, {})
    for name in groups.values:
        group = groups.section(name) or groups
        _check_format(group, group.get("format") or config.get("format"))
        weights = group.section("weights")
        if weights is not None:
            yield _group(weights)


def _check_format(owner: JsonObject, stated: object) -> None:
    if stated not in FORMATS:
        raise owner.error("format", f"one of {', '.join(FORMATS)}", stated, USE_ORIGINAL)


def _group(weights: JsonObject) -> Group:
    kind, bits = weights.text("type"), weights.integer("num_bits")
    if (kind, bits) not in (("float", 8), ("float", 4), ("int", 8), ("int", 4)):
        rule = "4 or 8"
        raise weights.error("num_bits", rule, f"{bits} with {kind}", USE_ORIGINAL)
    return Group(kind, bits, _block(weights))


def _block(weights: JsonObject) -> tuple[int, int]:
    """Return the rows and columns that share a scale. Without a ``strategy``, ``group_size`` tells it; -1 is all."""
    group_size = weights.get("group_size")
    implied = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    match weights.get("strategy") or implied:
        case "tensor":
            return WHOLE, WHOLE
        case "channel":
            return 1, WHOLE
        case "group" | "tensor_group":
            return 1, weights.integer("group_size")
        case "block":
            sizes = weights.integers("block_structure")
            if len(sizes) != 2 or 0 in sizes:
                raise weights.error(
                    "block_structure", "the rows and columns of a block", weights.get("block_structure")
                )
            return sizes[0], sizes[1]
        case other:
            raise weights.error("strategy", "one of tensor, channel, group, block", other, USE_ORIGINAL)


def _open_matrix(groups: tuple[Group, ...], parts: Parts) -> SourceTensor:
    """Open a matrix of whichever group its tensors are of: targets of groups need not be matched with names."""
    if COMMON in parts.tensors:
        if not any(group.kind == "float" and group.bits == 4 for group in groups):
            raise parts.error(COMMON, f"is of what config_groups say: {' or '.join(map(str, groups))}", "one of float4")
        return open_float4(parts, PACKED, SCALE, COMMON, divides=True)
    if PACKED in parts.tensors:
        return _open_packed([group for group in groups if group.kind == "int"], parts)
    dtype = parts.tensor(WEIGHT, (FLOAT8, INT8), (None, None)).dtype
    kind = "float" if dtype == FLOAT8 else "int"
    blocks = [group.block for group in groups if group.kind == kind and group.bits == 8]
    if not blocks:
        raise parts.error(WEIGHT, f"is of what config_groups say: {' or '.join(map(str, groups))}", dtype)
    return open_scaled(parts, dtype, SCALE, blocks, zeros=ZEROS)


def _open_packed(groups: list[Group], parts: Parts) -> SourceTensor:
    weights = parts.tensor(PACKED, ("int32",), (None, None))
    stated = read_whole(parts.tensor(SHAPE, ("int64", "int32"), (2,))).tolist()
    shape = (int(stated[0]), int(stated[1]))
    fitting = [group for group in groups if weights.shape == (shape[0], num_words(shape[1], group.bits))]
    if not fitting or min(shape) < 1:
        rule = f"holds the {list(shape)} codes of {SHAPE} in as many bits as config_groups say"
        raise parts.error(PACKED, rule, list(weights.shape))
    bits = fitting[0].bits
    scales = parts.tensor(SCALE, SCALE_DTYPES)
    block = find_block(parts, SCALE, shape, [group.block for group in fitting if group.bits == bits])
    num_groups = -(-shape[1] // block[1])
    zeros, are_packed = None, False
    if ZEROS in parts.tensors:
        are_packed = parts.tensors[ZEROS].dtype == "int32"
        wanted = (num_words(shape[0], bits), num_groups) if are_packed else scales.shape
        zeros = parts.tensor(ZEROS, ("int32", INT8), wanted)
    groups_of = parts.optional(GROUPS, ("int32", "int64"), (shape[1],))
    offset = np.float32(1 << bits - 1)

    def zero_points() -> NDArray[np.float32]:
        """The codes of zeros in the offsets that are stored."""
        if zeros is None:
            return np.full((-(-shape[0] // block[0]), num_groups), offset, np.float32)
        if not are_packed:
            return read_grid(zeros, shape, block) + offset
        unpacked = unpack_words(np.ascontiguousarray(read_whole(zeros).T), bits)[:, : shape[0]]
        return np.ascontiguousarray(unpacked.T.astype(np.float32))

    def grid() -> Grid:
        return Grid(
            read_grid(scales, shape, block), *block, zeros=zero_points(), groups=_order(parts, groups_of, num_groups)
        )

    def code_rows() -> Iterator[NDArray[np.uint8]]:
        for words in stored_rows(weights, rows_per_chunk(shape[1])):
            yield unpack_words(words, bits)[:, : shape[1]]

    return matrix_tensor(weights, shape, code_rows, grid)


def _order(parts: Parts, tensor: SourceTensor | None, num_groups: int) -> NDArray[np.int32] | None:
    if tensor is None:
        return None
    groups = read_whole(tensor)
    if (groups == -1).all():
        return None
    if groups.min() < 0 or groups.max() >= num_groups:
        got = f"{groups.min()} to {groups.max()}"
        raise parts.error(GROUPS, f"names groups from 0 to {num_groups - 1}, or is -1", got)
    return groups.astype(np.int32)

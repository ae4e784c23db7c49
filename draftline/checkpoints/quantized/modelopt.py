"""ModelOpt's layouts, as its unified export writes them: float8, int8, int4 of AWQ, NVFP4, and mixtures of them.

Source: ``quant_utils.py`` and ``convert_hf_config.py`` of ModelOpt's export. ``pre_quant_scale [in]`` is what the
network multiplies inputs by: where the export did not fold it into a norm, it is folded into the matrix's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.float4 import open_float4
from draftline.checkpoints.quantized.float8 import (
    ACTIVATIONS,
    KEYS_AND_VALUES,
    PER_OUTPUT,
    PER_TENSOR,
    SCALE,
    SCALE_INV,
)
from draftline.checkpoints.quantized.grid import Grid, matrix_tensor, read_grid
from draftline.checkpoints.quantized.layout import CACHE_NOTE, WEIGHT, Layout
from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts
from draftline.checkpoints.quantized.scaled import FLOAT8, INT8, SCALE_DTYPES, open_scaled
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor

SCALE_OF_SCALES, FACTORS = "weight_scale_2", "pre_quant_scale"
FLOAT8_BLOCK, DEFAULT_GROUPS = 128, {"W4A16_AWQ": 128, "INT4_AWQ": 128, "NVFP4": 16, "NVFP4_AWQ": 16}
MIXED = "MIXED_PRECISION"

OpenMatrix = Callable[[int, Parts], SourceTensor]


def _open_float8(blocks: tuple[tuple[int, int], ...], group_size: int, parts: Parts) -> SourceTensor:
    """Scales of blocks have the name of DeepSeek's in later versions of the export."""
    return open_scaled(parts, FLOAT8, SCALE_INV if SCALE_INV in parts.tensors else SCALE, blocks, factors=FACTORS)


def _open_int8(group_size: int, parts: Parts) -> SourceTensor:
    return open_scaled(parts, INT8, SCALE, (PER_OUTPUT,), factors=FACTORS)


def _open_int4(group_size: int, parts: Parts) -> SourceTensor:
    """A byte holds the codes, -8 to 7, of two outputs that follow each other, that of the even one low."""
    weight = parts.tensor(WEIGHT, ("uint8",), (None, None))
    shape = (2 * weight.shape[0], weight.shape[1])
    scales = parts.tensor(SCALE, SCALE_DTYPES[:3], (shape[0], -(-shape[1] // group_size)))
    factors = parts.optional(FACTORS, SCALE_DTYPES[:3], (shape[1],))

    def code_rows() -> Iterator[NDArray[Any]]:
        for octets in stored_rows(weight, max(1, rows_per_chunk(shape[1]) // 2)):
            both = np.stack([octets << np.uint8(4), octets], axis=1).view(np.int8) >> 4
            yield both.reshape(-1, shape[1])

    def grid() -> Grid:
        before = None if factors is None else read_whole(factors).astype(np.float32)
        return Grid(read_grid(scales, shape, (1, group_size)), 1, group_size, factors=before)

    return matrix_tensor(weight, shape, code_rows, grid)


def _open_float4(group_size: int, parts: Parts) -> SourceTensor:
    return open_float4(parts, WEIGHT, SCALE, SCALE_OF_SCALES, group_size=group_size, factors=FACTORS)


_BLOCK = ((FLOAT8_BLOCK, FLOAT8_BLOCK),)
# quant_algo -> what a matrix is, and how it is opened
ALGORITHMS: dict[str, tuple[str, OpenMatrix]] = {
    "FP8": ("FP8 (E4M3), a scale for each matrix", partial(_open_float8, (PER_TENSOR,))),
    "FP8_PER_CHANNEL_PER_TOKEN": ("FP8 (E4M3), a scale for each output", partial(_open_float8, (PER_OUTPUT,))),
    "FP8_PB_WO": ("FP8 (E4M3), a scale for 128 x 128 weights", partial(_open_float8, _BLOCK)),
    "W8A8_SQ_PER_CHANNEL": ("int8 of SmoothQuant, a scale for each output", _open_int8),
    "W4A16_AWQ": ("int4 of AWQ", _open_int4),
    "INT4_AWQ": ("int4 of AWQ", _open_int4),
    "NVFP4": ("NVFP4", _open_float4),
    "NVFP4_AWQ": ("NVFP4 of AWQ", _open_float4),
}


@dataclass(frozen=True)
class Algorithm:
    title: str
    open_matrix: Callable[[Parts], SourceTensor]


def modelopt_layout(config: JsonObject) -> Layout:
    """Read ``hf_quant_config.json`` or ``quantization_config``. Raises: CheckpointError of other algorithms."""
    config = config.section("quantization") or config  # of early exports, in either file
    named = str(config.get("quant_algo")).upper()
    layers: Mapping[str, Algorithm] = {}
    if named == MIXED:
        section = config.section("quantized_layers")
        if section is None or not section.values:
            raise config.error("quantized_layers", f"an object beside {MIXED}", config.get("quantized_layers"))
        layers = {name: _algorithm(_layer(section, name)) for name in section.values}
        titles = " and ".join(dict.fromkeys(algorithm.title for algorithm in layers.values()))
        open_matrix: Callable[[Parts], SourceTensor] = partial(_open_listed, layers)
    else:
        algorithm = _algorithm(config)
        titles, open_matrix = algorithm.title, algorithm.open_matrix
    cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
    return Layout(
        title=f"ModelOpt, {titles}",
        parts=frozenset((WEIGHT, SCALE, SCALE_INV, SCALE_OF_SCALES, FACTORS)),
        unused=ACTIVATIONS | KEYS_AND_VALUES,
        open_matrix=open_matrix,
        notes=(CACHE_NOTE,) if cache else (),
    )


def _layer(section: JsonObject, name: str) -> JsonObject:
    layer = section.section(name)
    if layer is None:
        raise section.error(name, "an object", None)
    return layer


def _algorithm(config: JsonObject) -> Algorithm:
    named = str(config.get("quant_algo")).upper()
    if named not in ALGORITHMS:
        cure = f"{USE_ORIGINAL}, or set engine.route to llmapi where TensorRT-LLM reads it"
        raise config.error("quant_algo", f"one of {', '.join(ALGORITHMS)}, {MIXED}", config.get("quant_algo"), cure)
    title, open_matrix = ALGORITHMS[named]
    group_size = _group_size(config, named)
    return Algorithm(
        f"{title} in groups of {group_size} inputs" if group_size else title, partial(open_matrix, group_size)
    )


def _group_size(config: JsonObject, named: str) -> int:
    """Return the inputs of a group, 0 for algorithms without; ``config.json`` writes them into ``config_groups``."""
    default = DEFAULT_GROUPS.get(named, 0)
    if not default or config.get("group_size") is not None:
        return config.integer("group_size") if default else 0
    sizes = set()
    for name in (groups := config.section("config_groups") or JsonObject(config.where, {})).values:
        weights = _layer(groups, name).section("weights")
        sizes.add(default if weights is None else weights.integer("group_size", default))
    if len(sizes) > 1:
        raise config.error("config_groups", "of one group_size", sorted(sizes))
    return sizes.pop() if sizes else default


def _open_listed(layers: Mapping[str, Algorithm], parts: Parts) -> SourceTensor:
    if parts.name not in layers:
        raise parts.error(next(iter(parts.tensors)), "is of a layer in quantized_layers", "none of that name")
    return layers[parts.name].open_matrix(parts)

"""Each quantised layout is read as exactly the weights that its codes and scales stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.names import check_tensors
from draftline.checkpoints.quantized.layout import dequantize
from draftline.checkpoints.quantized.recognition import recognise_layout
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.source_tensor import SourceTensor
from tests.tiny_packings import (
    Pack,
    awq_packing,
    compressed_packing,
    float8_packing,
    gptq_packing,
    modelopt_int4_packing,
)
from tests.tiny_quantized import AWQ, FP8, GPTQ, LAYOUTS, compressed, modelopt, write_quantized


@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_times_scales(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    plain = write_quantized(tmp_path, layout, num_layers=1)
    checkpoint = open_huggingface(tmp_path, "float32")
    check_tensors(checkpoint.config, checkpoint.tensors, tmp_path)
    for tensor_name, expected in plain.items():
        tensor = checkpoint.tensors[tensor_name]
        assert tensor.shape == expected.shape
        np.testing.assert_array_equal(read_whole(tensor).astype(np.float32), expected, tensor_name)
    assert checkpoint.notes[0].startswith(f"quantised: {layout.title}")
    assert checkpoint.notes[0].endswith("; 7 matrices")


def gptq_of(bits: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Pack, dict[str, Any]]:
    pack = gptq_packing(bits, group_size, version=2, symmetric=symmetric, act_order=act_order)
    return pack, GPTQ | {"bits": bits, "group_size": group_size, "checkpoint_format": "gptq_v2"}


def awq_of(bits: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Pack, dict[str, Any]]:
    return awq_packing(group_size, symmetric=symmetric), AWQ | {"group_size": group_size}


def packed_of(bits: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Pack, dict[str, Any]]:
    bits = 4 if bits < 4 else bits
    pack = compressed_packing(bits, group_size, symmetric=symmetric, act_order=act_order)
    return pack, compressed("pack-quantized", "int", bits, "group", group_size=group_size)


def float8_of(bits: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Pack, dict[str, Any]]:
    block = (bits, group_size)
    return float8_packing(block, "weight_scale_inv"), FP8 | {"weight_block_size": list(block)}


def int4_of(bits: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Pack, dict[str, Any]]:
    quantization = modelopt("W4A16_AWQ", group_size=group_size)["quantization"]
    return modelopt_int4_packing(group_size, smooth=symmetric), {"quant_method": "modelopt", **quantization}


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from([(gptq_of, 1, 32), (awq_of, 8, 1), (packed_of, 1, 1), (float8_of, 1, 1), (int4_of, 2, 1)]),
    rows=st.integers(1, 9),
    columns=st.integers(1, 3),
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.integers(1, 40),
    symmetric=st.booleans(),
    act_order=st.booleans(),
)
def test_sizes_that_divide_nothing(
    layout: tuple[Callable[..., tuple[Pack, dict[str, Any]]], int, int],
    rows: int,
    columns: int,
    bits: int,
    group_size: int,
    symmetric: bool,
    act_order: bool,
) -> None:
    """Outputs and inputs of whatever the packing can hold, groups and blocks of any size, the last of them short."""
    of, row_unit, column_unit = layout
    pack, quantization = of(bits, group_size, symmetric, act_order)
    shape = (rows * row_unit, columns * 32 if column_unit > 1 else 11 * columns)
    packed = pack(np.random.default_rng(rows).standard_normal(shape, np.float32))

    def tensor(values: NDArray[Any]) -> SourceTensor:
        return SourceTensor(Path("file"), values.dtype.name, values.shape, lambda: iter([values.reshape(-1)]))

    stored = {f"layer.{key}": tensor(values) for key, values in packed.parts.items()}
    plain, _ = dequantize(recognise_layout(JsonObject(Path("config.json"), quantization)), stored, "folder", ())
    assert plain["layer.weight"].shape == shape
    found = np.concatenate([chunk.copy() for chunk in plain["layer.weight"].chunks()]).reshape(shape)
    np.testing.assert_array_equal(found, packed.weights)

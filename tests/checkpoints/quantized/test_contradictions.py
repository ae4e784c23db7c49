"""Tensors that contradict their configuration, or each other, are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from tests.checkpoints.quantized.refusal import fails
from tests.tiny_quantized import LAYOUTS, MODELOPT_FILE, modelopt, write_quantized, write_stored

Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, NDArray[Any]]


def load(source: Path) -> Tensors:
    path = source / "model.safetensors"
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def drop(key: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{Q}.{key}")


def put(
    key: str, values: Callable[[NDArray[Any]], NDArray[Any]], source: str | None = None
) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(f"{Q}.{key}", values(tensors[f"{Q}.{source or key}"]))


def with_nan(values: NDArray[Any]) -> NDArray[Any]:
    values = values.copy()
    values.reshape(-1).view(np.uint8)[5] = 0x7F
    return values


def with_high_group(values: NDArray[Any]) -> NDArray[Any]:
    return np.where(np.arange(len(values)) == 3, 2, values).astype(np.int32)


BROKEN: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "scales missing": ("gptq", drop("scales"), f"{Q} has a tensor scales; got only g_idx, qweight, qzeros"),
    "zeros missing": ("awq", drop("qzeros"), f"{Q} has a tensor qzeros; got only"),
    "weights missing": ("gptq", drop("qweight"), f"{Q} has a tensor qweight; got only"),
    "both kinds": (
        "gptq",
        put("weight", lambda zeros: np.zeros((64, 64), np.float16), "qzeros"),
        "stored in one layout",
    ),
    "another layout's part": (
        "fp8-blocks",
        put("weight_packed", lambda codes: codes, "weight"),
        "also .*weight_packed",
    ),
    "zeros of another width": (
        "gptq",
        put("qzeros", lambda zeros: zeros[:, :-1]),
        "hold codes of 4 bits, as .*bits says, for 64 outputs; got 7",
    ),
    "sizes of its own": (
        "auto-round",
        put("qweight", lambda codes: np.tile(codes, (2, 1))),
        "qweight of sizes of its own has a g_idx beside it; got none",
    ),
    "stated bits": ("gptq", put("qweight", lambda codes: codes[:-1]), r"g_idx has shape \[56\]; got \[64\]"),
    "stated group": (
        "gptq-no-g-idx",
        put("qweight", lambda codes: np.tile(codes, (2, 1))),
        "qweight is in groups of 32 inputs, as .*group_size says; got 2 groups of 128 inputs",
    ),
    "group out of range": (
        "gptq-act-order",
        put("g_idx", with_high_group),
        "g_idx names groups from 0 to 1; got 0 to 2",
    ),
    "zero point of 0": ("gptq", put("qzeros", lambda zeros: zeros | 15), "holds no zero point of 0, .*gptq_v2"),
    "scales of integers": (
        "awq",
        put("scales", lambda scales: scales.astype(np.int32)),
        "scales is of dtype float16 or",
    ),
    "flat codes": ("awq", put("qweight", lambda codes: codes.reshape(-1)), r"qweight has shape \[any, any\]; got"),
    "awq groups": ("awq", put("scales", lambda scales: scales[:1]), r"scales has shape \[2, 64\]; got \[1, 64\]"),
    "plain weight with scale": (
        "fp8-blocks",
        put("weight", lambda codes: codes.astype(np.float16)),
        "weight is of dtype float8_e4m3fn; got float16",
    ),
    "blocks of another size": (
        "fp8-blocks",
        put("weight_scale_inv", lambda scales: scales[:, :1]),
        r"weight_scale_inv has shape \[2, 2\] beside a matrix of \[64, 64\]; got \[2, 1\]",
    ),
    "code without a value": ("fp8-blocks", put("weight", with_nan), f"tensor {Q}.weight is finite"),
    "scale without a value": ("awq", put("scales", lambda scales: scales * np.float16(np.inf)), "is finite"),
    "scale missing": ("fp8-static", drop("weight_scale"), "one of the dtypes|has a tensor weight_scale"),
    "shape missing": ("compressed-packed-4", drop("weight_shape"), "has a tensor weight_shape"),
    "shape of another matrix": (
        "compressed-packed-4",
        put("weight_shape", lambda shape: shape + 8),
        r"weight_packed holds the \[72, 72\] codes of weight_shape in as many bits",
    ),
    "groups of another size": (
        "compressed-packed-4",
        put("weight_scale", lambda scales: scales[:, :1]),
        r"weight_scale has shape \[64, 2\] beside",
    ),
    "group of packed codes": (
        "compressed-packed-asymmetric",
        put("weight_g_idx", with_high_group),
        "weight_g_idx names groups from 0 to 1, or is -1",
    ),
    "int8 where float8 is said": (
        "compressed-float-channel",
        put("weight", lambda codes: codes.view(np.int8)),
        "weight is of what config_groups say: float8, a scale for each output; got int8",
    ),
    "packed zeros": (
        "compressed-packed-asymmetric",
        put("weight_zero_point", lambda zeros: zeros[:-1]),
        r"weight_zero_point has shape \[8, 2\]; got \[7, 2\]",
    ),
    "factors": (
        "modelopt-awq",
        put("pre_quant_scale", lambda factors: factors[:-1]),
        r"pre_quant_scale has shape \[64\]",
    ),
    "float4 where int4 is said": (
        "compressed-packed-4",
        put("weight_global_scale", lambda scales: np.ones(1, np.float32), "weight_scale"),
        "weight_global_scale is of what config_groups say: int4, .*; got one of float4",
    ),
    "scale of scales": ("modelopt-nvfp4", drop("weight_scale_2"), "has a tensor weight_scale_2"),
    "factors of float4": (
        "modelopt-nvfp4",
        put("pre_quant_scale", lambda codes: np.ones(63, np.float32), "weight"),
        r"pre_quant_scale has shape \[64\]; got \[63\]",
    ),
    "vector of scales of scales": (
        "modelopt-nvfp4",
        put("weight_scale_2", lambda scale: np.ones(2, np.float32)),
        r"weight_scale_2 has shape \[\]; got \[2\]",
    ),
    "bias of a value": ("gptq", put("bias", lambda codes: np.ones(64, np.float16), "qweight"), "no others; got also"),
    "scale of nobody": (
        "awq",
        put("weight_scale", lambda scales: scales, "scales"),
        "no others; got also .*weight_scale",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_contradict_are_refused(tmp_path: Path, name: str) -> None:
    layout, change, rule = BROKEN[name]
    source = tmp_path / "s"
    write_quantized(source, LAYOUTS[layout], num_layers=1)
    tensors = load(source)
    change(tensors)
    write_stored(source, tensors)
    fails(source, rule)


def test_a_matrix_that_no_layer_of_a_mixture_names_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "s"
    write_quantized(source, LAYOUTS["modelopt-fp8"], num_layers=1)
    (source / MODELOPT_FILE).write_text(
        json.dumps(modelopt("MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "FP8"}}))
    )
    fails(source, "k_proj.weight.* is of a layer in quantized_layers; got none of that name")


@pytest.mark.parametrize(
    ("name", "key"), [("awq", "modules_to_not_convert"), ("fp8-static", "ignored_layers"), ("compressed-int", "ignore")]
)
def test_a_layer_that_was_to_stay_plain_is_refused_in_codes(tmp_path: Path, name: str, key: str) -> None:
    source = tmp_path / "s"
    layout = LAYOUTS[name]
    write_quantized(source, layout._replace(quantization=layout.quantization | {key: ["lm_head", Q]}), num_layers=1)
    fails(source, f"leaves out of quantisation are stored plain; got {Q} in codes")


def test_packed_tensors_without_a_configuration_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "s"
    write_quantized(source, LAYOUTS["fp8-static"]._replace(own_file="other.json"), num_layers=1)
    fails(source, "no others; got also .*input_scale")

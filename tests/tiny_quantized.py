"""Every quantised layout that is read, as a tiny checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from tests.tiny_checkpoints import random_tensors, write_tiny_checkpoint
from tests.tiny_packings import (
    Pack,
    awq_packing,
    compressed_packing,
    float4_packing,
    float8_packing,
    gptq_packing,
    int8_packing,
    modelopt_int4_packing,
)


class Layout(NamedTuple):
    """``quantization`` goes into ``config.json``, or whole into the file ``own_file`` beside it."""

    pack: Pack
    quantization: dict[str, Any]
    title: str
    own_file: str | None = None


def modelopt(algorithm: str | None, **more: Any) -> dict[str, Any]:
    values = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": values}


def compressed(form: str, kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 48]}
ONE = {"input_scale": np.ones((), np.float32)}
MODELOPT_FILE = "hf_quant_config.json"

LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(gptq_packing(), GPTQ, "GPTQ version 1, 4 bits in groups of 32 inputs"),
    "gptq-8": Layout(gptq_packing(8), GPTQ | {"bits": 8}, "GPTQ version 1, 8 bits in groups of 32 inputs"),
    "gptq-3": Layout(gptq_packing(3, symmetric=False), GPTQ | {"bits": 3, "sym": False}, "GPTQ version 1, 3 bits"),
    "gptq-2": Layout(gptq_packing(2), GPTQ | {"bits": 2}, "GPTQ version 1, 2 bits"),
    "gptq-asymmetric": Layout(gptq_packing(symmetric=False), GPTQ | {"sym": False}, "GPTQ version 1"),
    "gptq-act-order": Layout(
        gptq_packing(act_order=True),
        GPTQ | {"desc_act": True},
        "GPTQ version 1, 4 bits in groups of 32 inputs, in the order of activations",
    ),
    "gptq-v2": Layout(
        gptq_packing(version=2, symmetric=False),
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        "GPTQ version 2",
    ),
    "gptq-one-group": Layout(
        gptq_packing(group_size=-1), GPTQ | {"group_size": -1}, "GPTQ version 1, 4 bits in one group"
    ),
    "gptq-no-g-idx": Layout(gptq_packing(with_groups=False), GPTQ, "GPTQ version 1"),
    "gptq-own-file": Layout(
        gptq_packing(), {"bits": 4, "group_size": 32, "desc_act": False}, "GPTQ version 1", "quantize_config.json"
    ),
    "auto-round": Layout(
        gptq_packing(with_groups=False),
        AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 4}, "lm_head": {"bits": 16}}},
        "AutoRound, as GPTQ version 1, 4 bits in groups of 32 inputs, other sizes in some layers",
    ),
    "auto-round-awq": Layout(
        awq_packing(symmetric=True), AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, "AutoRound, as AWQ, 4 bits"
    ),
    "awq": Layout(awq_packing(), AWQ, "AWQ, 4 bits in groups of 32 inputs"),
    "awq-symmetric": Layout(awq_packing(symmetric=True), AWQ | {"zero_point": False}, "AWQ, 4 bits"),
    "awq-own-file": Layout(
        awq_packing(),
        {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True},
        "AWQ",
        "quant_config.json",
    ),
    "fp8-blocks": Layout(float8_packing((32, 48), "weight_scale_inv"), FP8, "FP8 (E4M3), a scale for 32 x 48 weights"),
    "fp8-blocks-bfloat16-scales": Layout(
        float8_packing((48, 32), "weight_scale_inv", scale_dtype="bfloat16"),
        FP8 | {"weight_block_size": [48, 32]},
        "FP8",
    ),
    "fp8-static": Layout(
        float8_packing((0, 0), squeeze=True, extra=ONE),
        {"quant_method": "fp8", "activation_scheme": "static"},
        "FP8 (E4M3), a scale for each matrix or output",
    ),
    "fbgemm": Layout(
        float8_packing((1, 0), extra={"input_scale_ub": np.ones(1, np.float32)}),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "FP8 (E4M3) of FBGEMM",
    ),
    "compressed-float-channel": Layout(
        float8_packing((1, 0), scale_dtype="bfloat16"),
        compressed("float-quantized", "float", 8, "channel"),
        "compressed-tensors, float8, a scale for each output",
    ),
    "compressed-float-tensor": Layout(
        float8_packing((0, 0), squeeze=True, extra=ONE),
        compressed("float-quantized", "float", 8, "tensor"),
        "compressed",
    ),
    "compressed-float-block": Layout(
        float8_packing((32, 48)),
        compressed("float-quantized", "float", 8, "block", block_structure=[32, 48]),
        "compressed-tensors, float8, a scale for each 32 x 48 weights",
    ),
    "compressed-int": Layout(
        int8_packing(), compressed("int-quantized", "int", 8, "channel"), "compressed-tensors, int8"
    ),
    "compressed-naive": Layout(
        int8_packing(symmetric=False), compressed("naive-quantized", "int", 8, "channel"), "compressed-tensors, int8"
    ),
    "compressed-float4": Layout(
        float4_packing(compressed=True),
        compressed("nvfp4-pack-quantized", "float", 4, "tensor_group", group_size=16),
        "compressed-tensors, float4, a scale for each 16 inputs",
    ),
    "compressed-packed-4": Layout(
        compressed_packing(4, 32),
        compressed("pack-quantized", "int", 4, "group", group_size=32),
        "compressed-tensors, int4, a scale for each 32 inputs",
    ),
    "compressed-packed-8": Layout(
        compressed_packing(8, 0), compressed("pack-quantized", "int", 8, "channel"), "compressed-tensors, int8"
    ),
    "compressed-packed-asymmetric": Layout(
        compressed_packing(4, 32, symmetric=False, act_order=True, dtype=np.float32),
        compressed("pack-quantized", "int", 4, "group", group_size=32, symmetric=False, actorder="group"),
        "compressed-tensors, int4",
    ),
    "modelopt-fp8": Layout(
        float8_packing((0, 0), squeeze=True, extra=ONE),
        modelopt("FP8", kv_cache_quant_algo="FP8"),
        "ModelOpt, FP8 (E4M3), a scale for each matrix",
        MODELOPT_FILE,
    ),
    "modelopt-fp8-inside": Layout(
        float8_packing((0, 0), squeeze=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "ModelOpt, FP8 (E4M3)",
    ),
    "modelopt-early": Layout(
        float8_packing((0, 0), squeeze=True), {"quant_method": "modelopt", **modelopt("FP8")}, "ModelOpt, FP8 (E4M3)"
    ),
    "modelopt-fp8-channel": Layout(
        float8_packing((1, 0)), modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "ModelOpt, FP8 (E4M3)", MODELOPT_FILE
    ),
    "modelopt-fp8-blocks": Layout(
        float8_packing((128, 128), "weight_scale_inv"), modelopt("fp8_pb_wo"), "ModelOpt, FP8 (E4M3)", MODELOPT_FILE
    ),
    "modelopt-awq": Layout(
        modelopt_int4_packing(),
        modelopt("W4A16_AWQ", group_size=32, has_zero_point=False, pre_quant_scale=True),
        "ModelOpt, int4 of AWQ in groups of 32 inputs",
        MODELOPT_FILE,
    ),
    "modelopt-smoothquant": Layout(
        int8_packing(smooth=True, vector=True), modelopt("W8A8_SQ_PER_CHANNEL"), "ModelOpt, int8", MODELOPT_FILE
    ),
    "modelopt-nvfp4": Layout(
        float4_packing(), modelopt("NVFP4", group_size=16), "ModelOpt, NVFP4 in groups of 16", MODELOPT_FILE
    ),
}


def write_quantized(directory: Path, layout: Layout, **options: Any) -> dict[str, NDArray[np.float32]]:
    """Write a checkpoint whose layers are quantised; return what its plain tensors are, in float32."""
    write_tiny_checkpoint(directory, **options)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    stored: dict[str, NDArray[Any]] = {}
    plain = random_tensors(config, options.get("seed", 0))
    for name, values in plain.items():
        if "_proj." not in name or not name.endswith(".weight"):
            stored[name] = values.astype(np.float16)
            plain[name] = stored[name].astype(np.float32)
            continue
        packed = layout.pack(values)
        plain[name] = packed.weights
        stored |= {f"{name.removesuffix('weight')}{key}": part for key, part in packed.parts.items()}
    write_stored(directory, stored)
    if layout.own_file is None:
        path.write_text(json.dumps(config | {"quantization_config": layout.quantization}))
    else:
        (directory / layout.own_file).write_text(json.dumps(layout.quantization))
    return plain


def write_stored(directory: Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write ``model.safetensors``, each tensor in its own dtype."""

    def entry(name: str, values: NDArray[Any]) -> TensorEntry:
        return TensorEntry(name, values.dtype.name, values.shape, lambda: [np.ascontiguousarray(values)])

    write_safetensors(directory / "model.safetensors", [entry(name, values) for name, values in tensors.items()])

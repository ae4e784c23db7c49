"""Other methods and versions are refused by name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.quantized.recognition import REFUSED
from tests.checkpoints.quantized.refusal import fails
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_quantized import (
    AUTO_ROUND,
    AWQ,
    FP8,
    GPTQ,
    MODELOPT_FILE,
    compressed,
    modelopt,
)

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("plain") / "s")


@contextlib.contextmanager
def saying(source: Path, quantization: object, file: str = "config.json") -> Iterator[None]:
    """Let a plain checkpoint say for a while that it is quantised."""
    path = source / file
    before = path.read_text() if path.exists() else None
    values = quantization if before is None else json.loads(before) | {"quantization_config": quantization}
    path.write_text(json.dumps(values))
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


CONFIGURATIONS: dict[str, tuple[object, str]] = {
    "no object": ([], "quantization_config is an object"),
    "no method": (
        {"bits": 4},
        "quantization_config.quant_method is one of gptq, awq, .*; got None; use the checkpoint",
    ),
    "a list": ({"quant_method": ["gptq"]}, "quant_method is one of .*; use the checkpoint"),
    "new method": ({"quant_method": "zq9"}, "got 'zq9'; use the checkpoint it was quantised from"),
    "gptq: bits": (GPTQ | {"bits": 5}, "quantization_config.bits is one of 2, 3, 4, 8; got 5"),
    "gptq: format": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is one of gptq, gptq_v2; got .*marlin"),
    "gptq: two formats": (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "got .*gptq and gptq_v2"),
    "gptq: marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format is false"),
    "gptq: words": (GPTQ | {"pack_dtype": "int64"}, "pack_dtype"),
    "gptq: adapter": (GPTQ | {"adapter": {"rank": 4}}, "quantization_config.adapter is absent"),
    "gptq: group": (GPTQ | {"group_size": 0}, "group_size is a positive integer; got 0"),
    "awq: bits": (AWQ | {"bits": 8}, "bits is 4; got 8"),
    "awq: version": (AWQ | {"version": "gemv_fast"}, 'version is "gemm"; got "gemv_fast"'),
    "auto-round: packing": (
        AUTO_ROUND | {"packing_format": "auto_round:gptq"},
        "packing_format is one of auto_round:auto",
    ),
    "auto-round: data": (AUTO_ROUND | {"data_type": "mx_fp"}, 'data_type is "int"'),
    "fp8: format": (FP8 | {"fmt": "e5m2"}, 'fmt is "e4m3"'),
    "fp8: experts": (FP8 | {"expert_dtype": "fp4"}, "expert_dtype"),
    "fp8: block": (FP8 | {"weight_block_size": [128]}, "weight_block_size is null, or the rows and columns"),
    "compressed: format": (
        compressed("marlin-24", "int", 4, "group", group_size=32),
        "format is one of float-quantized",
    ),
    "compressed: bits": (compressed("pack-quantized", "int", 3, "channel"), "weights.num_bits is 4 or 8; .*3 with int"),
    "compressed: type": (
        compressed("float-quantized", "float", 6, "channel"),
        "num_bits is 4 or 8; .*6 with float",
    ),
    "compressed: strategy": (
        compressed("int-quantized", "int", 8, "token"),
        "weights.strategy is one of tensor, channel",
    ),
    "compressed: no size": (
        compressed("pack-quantized", "int", 4, "group"),
        "weights.group_size is a positive integer",
    ),
    "compressed: no block": (
        compressed("float-quantized", "float", 8, "block"),
        "weights.block_structure is the rows and",
    ),
    "compressed: no groups": (
        compressed("int-quantized", "int", 8, "channel") | {"config_groups": {}},
        "config_groups",
    ),
    "compressed: sparse": (
        compressed("int-quantized", "int", 8, "channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config is absent or empty",
    ),
    "compressed: turned": (
        compressed("int-quantized", "int", 8, "channel") | {"transform_config": {"config_groups": {"u": {}}}},
        "transform_config is absent or empty",
    ),
    "modelopt: inside": (
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        "quant_algo is one of FP8, .*W4A8_AWQ",
    ),
}
FILES: dict[str, tuple[object, str]] = {
    "modelopt": (modelopt("MXFP4"), "hf_quant_config.json: quantization.quant_algo is one of .*llmapi"),
    "mixed": (modelopt("MIXED_PRECISION"), "quantization.quantized_layers is an object"),
    "mixed with another": (
        modelopt("MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "MXFP8"}}),
        "quantized_layers.model.layers.0.self_attn.q_proj.quant_algo is one of",
    ),
    "groups": (modelopt("W4A16_AWQ", group_size=-1), "group_size is a positive integer"),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_another_version_is_refused(plain: Path, name: str) -> None:
    quantization, rule = CONFIGURATIONS[name]
    with saying(plain, quantization):
        fails(plain, rule)


@pytest.mark.parametrize("name", FILES)
def test_another_algorithm_of_modelopt_is_refused(plain: Path, name: str) -> None:
    quantization, rule = FILES[name]
    with saying(plain, quantization, MODELOPT_FILE):
        fails(plain, rule)


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_are_not_read_are_refused_with_the_reason(plain: Path, method: str) -> None:
    with saying(plain, {"quant_method": method, "load_in_4bit": True}):
        fails(plain, f"quant_method is one of .*; got '{method}', {REFUSED[method][:20]}.*; use the checkpoint")


@pytest.mark.parametrize("quantization", [GPTQ, AWQ, FP8, compressed("int-quantized", "int", 8, "channel")])
def test_a_configuration_without_its_tensors_is_refused(plain: Path, quantization: object) -> None:
    with saying(plain, quantization):
        fails(plain, "the checkpoint holds what its configuration says, .*; got tensors of float32 and none of it")


def test_two_files_that_disagree_are_refused(plain: Path) -> None:
    inside = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    with saying(plain, modelopt("FP8"), MODELOPT_FILE), saying(plain, inside):
        fails(plain, "config.json and hf_quant_config.json name one quant_algo; got NVFP4 and FP8")


def test_another_tools_file_of_the_same_name_changes_nothing(plain: Path) -> None:
    with saying(plain, {"schedule": "cosine"}, "quant_config.json"), saying(plain, {}, "quantize_config.json"):
        convert_checkpoint(plain, plain.parent / "other", "float32", lambda done, total: None)


def test_quantised_keys_and_values_alone_change_nothing(plain: Path) -> None:
    with saying(plain, modelopt(None, kv_cache_quant_algo="FP8"), MODELOPT_FILE):
        convert_checkpoint(plain, plain.parent / "kv", "float32", lambda done, total: None)

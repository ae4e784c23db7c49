"""Converting mixtures of experts: TensorRT-LLM's names, shapes and configuration, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.ranks.convert import convert_for_ranks
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.ranks.merge import merge_checkpoint
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.show import describe_checkpoint
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint, write_weights

# Architecture -> router, and up, gate and down projection of an expert; the number of experts.
SOURCES: dict[Architecture, tuple[str, tuple[str, str, str], int]] = {
    "mixtral": ("block_sparse_moe.gate", ("w3", "w1", "w2"), 4),
    "qwen3_moe": ("mlp.gate", ("up_proj", "gate_proj", "down_proj"), 8),
}
REFUSED_RANKS = "checkpoints of trtllm-build are written for .*; got {}; set engine.route to llmapi"


def ignore(done: int, total: int) -> None:
    assert done <= total


def read(path: Path) -> dict[str, NDArray[Any]]:
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def refusal(source: Path, rule: str) -> str:
    with pytest.raises(CheckpointError, match=rule) as caught:
        convert_checkpoint(source, source.parent / "converted", "float32", ignore)
    assert not (source.parent / "converted").exists()
    return str(caught.value)


@pytest.mark.parametrize("architecture", SOURCES)
def test_the_layout_is_tensorrt_llm_s(tmp_path: Path, architecture: Architecture) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", architecture, shards=3)
    convert_checkpoint(source, tmp_path / "c", "float32", ignore)
    stored: dict[str, NDArray[Any]] = {}
    for shard in source.glob("*.safetensors"):
        stored |= read(shard)
    converted = read(tmp_path / "c" / "rank0.safetensors")
    router, (up, gate, down), count = SOURCES[architecture]
    for layer in range(2):
        prefix, mlp = f"transformer.layers.{layer}.mlp", f"model.layers.{layer}.{router.rpartition('.')[0]}"

        def of_all(name: str, mlp: str = mlp) -> NDArray[Any]:
            return np.stack([stored[f"{mlp}.experts.{expert}.{name}.weight"] for expert in range(count)])

        np.testing.assert_array_equal(converted[f"{prefix}.router.weight"], stored[f"{mlp}.gate.weight"])
        np.testing.assert_array_equal(converted[f"{prefix}.proj.weight"], of_all(down))
        both = np.concatenate([of_all(up), of_all(gate)], axis=1)
        np.testing.assert_array_equal(converted[f"{prefix}.fc.weight"], both)
        assert f"{prefix}.gate.weight" not in converted


@pytest.mark.parametrize(
    ("architecture", "moe", "width", "qwen_type"),
    [
        ("mixtral", {"num_experts": 4, "top_k": 2, "normalization_mode": 1}, 96, None),
        ("qwen3_moe", {"num_experts": 8, "top_k": 3, "normalization_mode": 0}, 48, "qwen3_moe"),
    ],
)
def test_the_configuration_is_tensorrt_llm_s(
    tmp_path: Path, architecture: Architecture, moe: dict[str, int], width: int, qwen_type: str | None
) -> None:
    renormalises = bool(moe["normalization_mode"])
    source = write_tiny_checkpoint(tmp_path / "s", architecture, extra_config={"norm_topk_prob": renormalises})
    config = convert_checkpoint(source, tmp_path / "c", "bfloat16", ignore)
    assert load_checkpoint_config(tmp_path / "c") == config
    path = tmp_path / "c" / "config.json"
    raw = json.loads(path.read_text())
    assert (raw["moe"], raw["moe_intermediate_size"], raw.get("qwen_type")) == (moe, width, qwen_type)
    assert "experts" not in raw
    path.write_text(json.dumps(raw | {"moe": moe | {"normalization_mode": 2}}))
    with pytest.raises(CheckpointError, match="moe is an object whose normalization_mode is one of 0, 1; got"):
        load_checkpoint_config(tmp_path / "c")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_of_experts_as_transformers_saves_it(tmp_path: Path, dtype: str) -> None:
    """Up above gate, as of other mixtures; the source has inputs as rows, and gate and up take turns."""
    source = write_tiny_checkpoint(tmp_path / "s", "gpt_oss", shards=2, dtype=dtype)
    config = convert_checkpoint(source, tmp_path / "c", dtype, ignore)
    assert load_checkpoint_config(tmp_path / "c") == config
    stored: dict[str, NDArray[Any]] = {}
    for shard in source.glob("*.safetensors"):
        stored |= read(shard)
    converted = read(tmp_path / "c" / "rank0.safetensors")
    for layer in range(2):
        prefix, mlp = f"transformer.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        for kind in ("weight", "bias"):
            np.testing.assert_array_equal(converted[f"{prefix}.router.{kind}"], stored[f"{mlp}.router.{kind}"])
        both, down = (stored[f"{mlp}.experts.{name}_proj"].swapaxes(1, 2) for name in ("gate_up", "down"))
        np.testing.assert_array_equal(converted[f"{prefix}.fc.weight"][:, :96], both[:, 1::2])
        np.testing.assert_array_equal(converted[f"{prefix}.fc.weight"][:, 96:], both[:, ::2])
        np.testing.assert_array_equal(converted[f"{prefix}.proj.weight"], down)
        biases = stored[f"{mlp}.experts.gate_up_proj_bias"]
        above = np.concatenate([biases[:, 1::2], biases[:, ::2]], axis=1)
        np.testing.assert_array_equal(converted[f"{prefix}.fc.bias"], above)
        down_biases = stored[f"{mlp}.experts.down_proj_bias"]
        np.testing.assert_array_equal(converted[f"{prefix}.proj.bias"], down_biases)
        sinks = stored[f"model.layers.{layer}.self_attn.sinks"]
        np.testing.assert_array_equal(converted[f"transformer.layers.{layer}.attention.sinks"], sinks)


def test_a_stack_of_another_shape(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "gpt_oss")
    tensors = read(source / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    write_weights(source, tensors, "float32")
    refusal(source, rf"tensor {name} has shape \[4, 64, 192\]; got \[4, 192, 64\]")


def test_an_expert_that_lacks_a_tensor(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "mixtral")
    tensors = read(source / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    write_weights(source, tensors, "float32")
    assert refusal(source, "got without").count(name) == 1


def test_an_expert_of_another_shape(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "qwen3_moe")
    tensors = read(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    write_weights(source, tensors, "float32")
    refusal(source, rf"tensor {name} has shape \[48, 64\]; got \[64, 48\]")


@pytest.mark.parametrize(
    ("count", "message"), [(3, r"also model.layers.0.*experts.3.w1"), (5, "got without .*experts.4.w3")]
)
def test_a_count_that_disagrees_with_the_tensors(tmp_path: Path, count: int, message: str) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "mixtral")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(raw | {"num_local_experts": count}))
    if count == 3:  # a router of as many rows
        tensors = read(source / "model.safetensors")
        for layer in range(2):
            name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
            tensors[name] = tensors[name][:count]
        write_weights(source, tensors, "float32")
    refusal(source, message)


@pytest.mark.parametrize(
    ("architecture", "name"), [("mixtral", "MixtralForCausalLM"), ("gpt_oss", "GptOssForCausalLM")]
)
def test_ranks_are_of_dense_models(tmp_path: Path, architecture: Architecture, name: str) -> None:
    source, rule = write_tiny_checkpoint(tmp_path / "s", architecture), REFUSED_RANKS.format(name)
    with pytest.raises(CheckpointError, match=f"target: {rule}"):
        convert_for_ranks(source, tmp_path / "out", "float16", Mapping(), None, ignore)
    convert_checkpoint(source, tmp_path / "c", "float16", ignore)
    with pytest.raises(CheckpointError, match=rule):
        merge_checkpoint(tmp_path / "c", tmp_path / "out", ignore)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_says_how_many_it_has(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "qwen3_moe")
    assert "experts: 8 in a layer, 48 wide, 3 for a token" in describe_checkpoint(str(source), None)

"""What TensorRT-LLM's PyTorch backend is given: more targets than graphs here express, and heads it reads alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.llmapi import Published, check_published, load_published, read_published
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_layouts import NUM_LAYERS, ROWS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("llmapi") / "target", num_layers=NUM_LAYERS)


def edited(target: Path, folder: Path, **keys: Any) -> Path:
    """The target with other keys in its configuration; None removes one."""
    shutil.copytree(target, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
        {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    ],
)
def test_targets_of_other_networks_are_taken_as_published(target: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    """A head fits them by sizes alone; of their weights, files of whatever dtype, only the presence is looked at."""
    folder = edited(target, tmp_path / "model", **keys)
    (folder / "model.safetensors").write_bytes(b"a dtype that nobody knows here")
    head = ROWS["reference"].write(tmp_path / "head", target)
    found = check_published(folder, head, "eagle3", "float16", tmp_path, (1, 3, 4))
    assert found.architecture == keys.get("architectures", ["LlamaForCausalLM"])[0]
    assert (found.captured_layers, found.num_hidden_layers) == ((1, 3, 4), NUM_LAYERS)
    assert found.latent_rank == keys.get("kv_lora_rank")
    assert load_published(tmp_path) == found
    assert (tmp_path / "tokenizer.json").is_file()


def test_sizes_of_a_model_that_reads_images_are_those_of_its_text(target: Path, tmp_path: Path) -> None:
    raw = json.loads((target / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "sliding_window")
    inner = {key: raw.get(key, 64) for key in sizes}
    scaling = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    outer = dict.fromkeys(sizes)
    folder = edited(
        target,
        tmp_path / "model",
        **outer,
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={**inner, "rope_parameters": scaling},
    )
    assert read_published(folder) == Published(
        "Gemma3ForConditionalGeneration",
        raw["vocab_size"],
        raw["hidden_size"],
        NUM_LAYERS,
        raw["max_position_embeddings"],
        sliding_window=64,
    )


def test_scaled_positions_are_known(target: Path, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    folder = edited(target, tmp_path / "model", rope_scaling=scaling, rope_parameters=None)
    assert read_published(folder).num_positions == 4096


@pytest.mark.parametrize(
    ("quantization", "got"),
    [
        ({"quant_method": "awq", "bits": 4}, '"awq"'),
        ({"quant_method": "gptq", "bits": 4}, '"gptq"'),
        ({"quant_method": "bitsandbytes"}, '"bitsandbytes"'),
        ({"bits": 4}, "null"),
        ({"quant_method": "fp8"}, "null"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
    ],
)
def test_quantised_targets_that_would_be_read_as_plain_ones_are_refused(
    target: Path, tmp_path: Path, quantization: dict[str, Any], got: str
) -> None:
    folder = edited(target, tmp_path / "model", quantization_config=quantization)
    with pytest.raises(
        CheckpointError, match=rf"backend reads quant_method .*; got {got}; choose the checkpoint it was"
    ):
        read_published(folder)


def test_a_quantisation_that_stands_in_a_file_of_its_tool_is_refused_too(target: Path, tmp_path: Path) -> None:
    folder = edited(target, tmp_path / "model")
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    with pytest.raises(CheckpointError, match=r'quantize_config.json: .*reads quant_method .*; got "gptq"'):
        read_published(folder)


def test_every_file_of_the_weights_is_there(target: Path, tmp_path: Path) -> None:
    folder = edited(target, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"holds every file that it names; got no model-2\.safetensors; fetch"):
        read_published(folder)
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert read_published(folder).architecture == "LlamaForCausalLM"


UNREADABLE = {
    **{name: "the layout of speculators" for name, row in ROWS.items() if row.layout.endswith("speculators")},
    "modelopt-two-layers": "input_layernorm in layers behind the first",
}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.method == "eagle3"])
def test_heads_are_read_or_refused_by_name(target: Path, tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    head = row.write(tmp_path / "head", target)

    def read() -> Published:
        return check_published(target, head, "eagle3", "float16", tmp_path, row.captured)

    if name in UNREADABLE:
        with pytest.raises(
            CheckpointError, match=rf"of the reference, SpecForge and ModelOpt; got .*{UNREADABLE[name]}"
        ):
            read()
    else:
        assert read().captured_layers == row.captured


def test_layers_that_can_be_read_in_two_ways_are_to_be_stated(target: Path, tmp_path: Path) -> None:
    head = ROWS["modelopt"].write(tmp_path / "head", target)
    assert check_published(target, head, "eagle3", "float16", tmp_path).captured_layers == (0, 2), "one can be meant"
    head = ROWS["reference"].write(tmp_path / "open", target)
    got = r"got outputs of \[1, 3, 4\] or \[2, 4, 5\] or \[0, 2, 3\]; set draft\.captured_layers to those"
    with pytest.raises(CheckpointError, match=got):
        check_published(target, head, "eagle3", "float16", tmp_path)
    assert check_published(target, head, "eagle3", "float16", tmp_path, (2, 4, 5)).captured_layers == (2, 4, 5)

"""Conversion end to end on tiny checkpoints: the same numbers under the new names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints import safetensors_file
from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.names import weight_map
from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.checkpoints.trtllm import load_checkpoint_config
from tests.checkpoints.conversion import fails, ignore_progress, load_all, tensors_of
from tests.tiny_checkpoints import (
    CLASS_NAMES,
    Architecture,
    write_tiny_checkpoint,
)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", CLASS_NAMES)
def test_each_architecture_keeps_its_numbers(tmp_path: Path, architecture: Architecture, tie: bool) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    source = write_tiny_checkpoint(tmp_path / "s", architecture, tie=tie, head_dim=24, shards=3, extra_config=biases)
    config = convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)
    assert load_checkpoint_config(tmp_path / "c") == config
    assert (config.architecture, config.head_size) == (CLASS_NAMES[architecture], 24)
    original, converted = tensors_of(source), load_all(tmp_path / "c")
    assert [(target.key, target.shape) for target in weight_map(config)] == [
        (name, values.shape) for name, values in converted.items()
    ]
    assert ("lm_head.weight" in converted) is not tie
    used = set()
    for target in weight_map(config):
        joined = np.concatenate([original[name] for name, _ in target.sources])
        if target.num_in_turn:
            kinds = [joined[..., kind :: target.num_in_turn] for kind in reversed(range(target.num_in_turn))]
            joined = np.concatenate(kinds, axis=-1).swapaxes(1, -1)
        index, num_parts = target.part
        part = np.split(joined, num_parts)[index] + np.float32(target.addend)
        np.testing.assert_array_equal(converted[target.key], part.reshape(target.shape))
        used |= {name for name, _ in target.sources}
    assert used == set(original)


def test_the_names_follow_tensorrt_llm(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", "qwen2")
    convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)
    original, converted = tensors_of(source), load_all(tmp_path / "c")
    layer, hf_layer = "transformer.layers.1", "model.layers.1"
    np.testing.assert_array_equal(converted[f"{layer}.mlp.fc.weight"], original[f"{hf_layer}.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(converted[f"{layer}.mlp.gate.weight"], original[f"{hf_layer}.mlp.up_proj.weight"])
    qkv = [original[f"{hf_layer}.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(converted[f"{layer}.attention.qkv.bias"], np.concatenate(qkv))
    names = list(converted)
    assert names.index(f"{layer}.mlp.gate.weight") == names.index(f"{layer}.mlp.fc.weight") + 1
    raw = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (raw["qwen_type"], raw["attn_bias"], raw["position_embedding_type"]) == ("qwen2", True, "rope_gpt_neox")


def test_norms_that_add_one_do_so_once(tmp_path: Path) -> None:
    """In float32, whatever the checkpoint's dtype: 1 + weight would lose what a 16-bit weight has."""
    source = write_tiny_checkpoint(tmp_path / "s", "gemma3", dtype="bfloat16")
    convert_checkpoint(source, tmp_path / "c", "bfloat16", ignore_progress)
    original, converted = tensors_of(source), load_all(tmp_path / "c")
    names = {
        "transformer.ln_f": "model.norm",
        "transformer.layers.1.post_layernorm": "model.layers.1.post_attention_layernorm",
        "transformer.layers.0.pre_feedforward_layernorm": "model.layers.0.pre_feedforward_layernorm",
        "transformer.layers.0.attention.k_layernorm": "model.layers.0.self_attn.k_norm",
    }
    for key, name in names.items():
        stored = original[f"{name}.weight"].astype(numpy_dtype("bfloat16")).astype(np.float32)
        assert converted[f"{key}.weight"].dtype == np.float32
        np.testing.assert_array_equal(converted[f"{key}.weight"], stored + np.float32(1))
    assert converted["transformer.layers.0.mlp.fc.weight"].dtype == numpy_dtype("bfloat16")


def test_joined_projections_come_apart_where_a_chunk_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are halves of one tensor of Phi-3, whose chunks end anywhere."""
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 4 * 1000)
    source = write_tiny_checkpoint(tmp_path / "s", "phi3", intermediate_size=100)
    convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)
    original, converted = tensors_of(source), load_all(tmp_path / "c")
    both = original["model.layers.1.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(converted["transformer.layers.1.mlp.fc.weight"], both[:100])
    np.testing.assert_array_equal(converted["transformer.layers.1.mlp.gate.weight"], both[100:])
    qkv = original["model.layers.1.self_attn.qkv_proj.weight"]
    np.testing.assert_array_equal(converted["transformer.layers.1.attention.qkv.weight"], qkv)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("source_dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_round_to_nearest_even(tmp_path: Path, source_dtype: str, dtype: str) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", dtype=source_dtype)
    assert convert_checkpoint(source, tmp_path / "c", dtype, ignore_progress).dtype == dtype
    stored = tensors_of(source)["model.embed_tokens.weight"].astype(numpy_dtype(source_dtype))
    converted = load_all(tmp_path / "c")["transformer.vocab_embedding.weight"]
    np.testing.assert_array_equal(converted, stored.astype(numpy_dtype(dtype)))


def test_tokenizer_files_travel_and_progress_reaches_the_end(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (source / "README.md").write_text("not copied")
    calls: list[tuple[int, int]] = []
    config = convert_checkpoint(source, tmp_path / "c", "float16", lambda done, total: calls.append((done, total)))
    assert config.eos_token_ids == (2, 0)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "config.json",
        "generation_config.json",
        "rank0.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    total_bytes = sum(location.num_bytes for location in tensor_locations(tmp_path / "c/rank0.safetensors").values())
    assert calls[-1] == (total_bytes, total_bytes)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_a_converted_checkpoint_is_replaced_and_anything_else_is_kept(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    for dtype in ("float32", "float16"):
        convert_checkpoint(source, tmp_path / "c", dtype, ignore_progress)
    assert load_checkpoint_config(tmp_path / "c").dtype == "float16"
    (tmp_path / "converted").mkdir()
    (tmp_path / "converted" / "diary.txt").write_text("keep")
    fails(source, "new, empty or a converted checkpoint")
    assert (tmp_path / "converted" / "diary.txt").read_text() == "keep"


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    for name in ("a", "b"):
        convert_checkpoint(source, tmp_path / name, "bfloat16", ignore_progress)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

"""Key sets, shapes and configuration fields as TensorRT-LLM's converters write them, for world sizes 1, 2 and 4.

The tables are written out from its documentation (``examples/{medusa,eagle}/convert_checkpoint.py``,
``models/{medusa,eagle}/weight.py``), not computed with the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.ranks.convert import HeadSource, convert_for_ranks
from draftline.checkpoints.ranks.layout import Layout
from draftline.checkpoints.ranks.mapping import Mapping, weights_file
from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.checkpoints.trtllm import OWN_KEYS
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_medusa

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_SIZE = 64, 96, 283, 4, 2, 16


def sizes(world_size: int) -> dict[str, int]:
    kv_heads = max(KV_HEADS // world_size, 1)
    return {
        "qkv": (HEADS // world_size + 2 * kv_heads) * HEAD_SIZE,
        "q": HEADS * HEAD_SIZE // world_size,
        "ffn": FFN // world_size,
        "hidden": HIDDEN // world_size,
        "vocab": {1: 283, 2: 142, 4: 71}[world_size],
    }


def target_shapes(world_size: int) -> dict[str, tuple[int, ...]]:
    size = sizes(world_size)
    shapes: dict[str, tuple[int, ...]] = {"transformer.vocab_embedding.weight": (VOCAB, HIDDEN)}
    for layer in range(2):
        prefix = f"transformer.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.attention.qkv.weight": (size["qkv"], HIDDEN),
            f"{prefix}.attention.dense.weight": (HIDDEN, size["q"]),
            f"{prefix}.post_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.fc.weight": (size["ffn"], HIDDEN),
            f"{prefix}.mlp.gate.weight": (size["ffn"], HIDDEN),
            f"{prefix}.mlp.proj.weight": (HIDDEN, size["ffn"]),
        }
    return shapes | {"transformer.ln_f.weight": (HIDDEN,), "lm_head.weight": (size["vocab"], HIDDEN)}


def medusa_shapes(world_size: int) -> dict[str, tuple[int, ...]]:
    size = sizes(world_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes |= {
            f"medusa_heads.{head}.medusa_layers.0.linear.weight": (size["hidden"], HIDDEN),
            f"medusa_heads.{head}.medusa_layers.0.linear.bias": (size["hidden"],),
            f"medusa_heads.{head}.lm_head.weight": (size["vocab"], HIDDEN),
        }
    return shapes


def eagle_shapes(world_size: int) -> dict[str, tuple[int, ...]]:
    size = sizes(world_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for copy in range(2):
        prefix = f"eagle_nets.{copy}"
        shapes |= {
            f"{prefix}.lm_head.weight": (size["vocab"], HIDDEN),
            f"{prefix}.drafter.fc.weight": (size["hidden"], 2 * HIDDEN),
            f"{prefix}.drafter.fc.bias": (size["hidden"],),
            f"{prefix}.drafter.vocab_embedding.weight": (VOCAB, HIDDEN),
            f"{prefix}.drafter.layers.0.attention.qkv.weight": (size["qkv"], HIDDEN),
            f"{prefix}.drafter.layers.0.attention.dense.weight": (HIDDEN, size["q"]),
            f"{prefix}.drafter.layers.0.post_layernorm.weight": (HIDDEN,),
            f"{prefix}.drafter.layers.0.mlp.fc.weight": (size["ffn"], HIDDEN),
            f"{prefix}.drafter.layers.0.mlp.gate.weight": (size["ffn"], HIDDEN),
            f"{prefix}.drafter.layers.0.mlp.proj.weight": (HIDDEN, size["ffn"]),
        }
    return shapes


def llama_config(world_size: int, num_layers: int) -> dict[str, Any]:
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "logits_dtype": "float32",
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_key_value_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "vocab_size": VOCAB,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rotary_base": 10000.0,
        "rotary_scaling": None,
        "norm_epsilon": 1e-5,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": world_size, "tp_size": world_size, "pp_size": 1},
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "attn_bias": False,
        "mlp_bias": False,
        "qk_layernorm": False,
    }


def convert(tmp_path: Path, method: Any, world_size: int, **model: Any) -> Layout:
    source = write_tiny_checkpoint(
        tmp_path / "model", vocab_size=VOCAB, dtype="float16", rope_theta=model.pop("rope_theta", 10000.0), **model
    )
    head = None
    if method == "medusa":
        write_tiny_medusa(tmp_path / "head", source, num_heads=3, dtype="float16")
    elif method == "eagle1":
        write_tiny_eagle1(tmp_path / "head", source, dtype="float16")
    if method is not None:
        head = HeadSource(tmp_path / "head", method, num_draft_tokens=5, max_depth=2, max_non_leaves=10)
    return convert_for_ranks(source, tmp_path / "out", "float16", Mapping(world_size), head, lambda done, total: None)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("method", [None, "medusa", "eagle1"])
def test_keys_shapes_and_fields_are_theirs(tmp_path: Path, method: str | None, world_size: int) -> None:
    convert(tmp_path, method, world_size)
    expected = target_shapes(world_size)
    expected |= {None: {}, "medusa": medusa_shapes(world_size), "eagle1": eagle_shapes(world_size)}[method]
    for rank in range(world_size):
        locations = tensor_locations(weights_file(tmp_path / "out", rank))
        assert {name: location.shape for name, location in locations.items()} == expected
        assert {location.dtype for location in locations.values()} == {"float16"}

    fields = llama_config(world_size, 2)
    if method == "medusa":
        fields |= {
            "architecture": "MedusaForCausalLM",
            "max_draft_len": 5,
            "num_medusa_heads": 3,
            "num_medusa_layers": 1,
        }
    elif method == "eagle1":
        fields |= {
            "architecture": "EagleForCausalLM",
            "max_draft_len": 5,
            "num_eagle_layers": 2,
            "max_non_leaves_per_layer": 10,
            "eagle_net_config": llama_config(world_size, 1),
        }
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: value for key, value in written.items() if key not in OWN_KEYS} == fields
    assert set(OWN_KEYS) < set(written)


def test_an_eagle_network_keeps_its_own_rope(tmp_path: Path) -> None:
    """A head that says nothing of it has 10000, whatever its target has."""
    convert(tmp_path, "eagle1", 1, rope_theta=500000.0)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["rotary_base"], written["eagle_net_config"]["rotary_base"]) == (500000.0, 10000.0)


@pytest.mark.parametrize(("architecture", "qwen_type"), [("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_medusa_heads_of_a_qwen_target_say_so(tmp_path: Path, architecture: Any, qwen_type: str) -> None:
    convert(tmp_path, "medusa", 2, architecture=architecture)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architecture"] == "MedusaForCausalLM"
    assert written["model_type"] == written["qwen_type"] == qwen_type


@pytest.mark.parametrize(
    ("method", "world_size", "model", "message"),
    [
        (
            "eagle1",
            1,
            {"architecture": "qwen2"},
            "draft: TensorRT-LLM's EAGLE engines are of the Llama family; got Qwen2",
        ),
        (
            None,
            1,
            {"architecture": "gemma3"},
            "target: checkpoints of trtllm-build are written for .* got Gemma3ForCausalLM; set engine.route to llmapi",
        ),
        (
            None,
            1,
            {
                "architecture": "qwen2",
                "extra_config": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            },
            r"all layers one attention window; got layers \[0\] without one",
        ),
        (None, 4, {"intermediate_size": 90}, "engine.tensor_parallel_size: the target's intermediate_size 90 divides"),
    ],
)
def test_what_the_layout_cannot_hold(
    tmp_path: Path, method: Any, world_size: int, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path, method, world_size, **model)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"qkv_bias": True}, "also layers.0.attention.qkv.bias"),
        ({"num_layers": 2}, "also layers.1.input_layernorm.weight"),
    ],
)
def test_no_tensor_of_a_head_is_left_out(tmp_path: Path, options: dict[str, Any], got: str) -> None:
    source = write_tiny_checkpoint(tmp_path / "model")
    write_tiny_eagle1(tmp_path / "head", source, **options)
    head = HeadSource(tmp_path / "head", "eagle1", num_draft_tokens=2, max_depth=2, max_non_leaves=10)
    with pytest.raises(
        CheckpointError, match=rf"network of such a draft has every tensor of it; got {got}; set engine"
    ):
        convert_for_ranks(source, tmp_path / "out", "float16", Mapping(), head, lambda done, total: None)


def test_heads_that_are_fewer_than_the_tree_is_deep(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "model")
    write_tiny_medusa(tmp_path / "head", source, num_heads=3)
    head = HeadSource(tmp_path / "head", "medusa", num_draft_tokens=4, max_depth=4, max_non_leaves=10)
    with pytest.raises(CheckpointError, match=r"tree.max_depth: the heads draft 3 tokens, one each; got 4"):
        convert_for_ranks(source, tmp_path / "out", "float16", Mapping(), head, lambda done, total: None)
    assert not (tmp_path / "out").exists()

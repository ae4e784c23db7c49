"""Write and read ``config.json`` of a checkpoint for several ranks, with Medusa heads or an EAGLE network in it.

Source: TensorRT-LLM's checkpoint documentation, ``examples/{medusa,eagle}/convert_checkpoint.py`` and the classes
``LLaMAConfig``, ``QWenConfig``, ``MedusaConfig`` and ``EagleConfig``. The names written here are theirs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.ranks.layout import MAX_NON_LEAVES_PER_LAYER, Layout, Speculation
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.trtllm import (
    CONFIG_FILE,
    FIXED,
    KEYS,
    OWN_KEYS,
    QWEN_TYPES,
    config_values,
    parse_config,
    write_json,
)

MEDUSA, EAGLE = "MedusaForCausalLM", "EagleForCausalLM"
LLAMA = "LlamaForCausalLM"

_ARCHITECTURES = {qwen_type: architecture for architecture, qwen_type in QWEN_TYPES.items()}
_MERGED = "merge what TensorRT-LLM's converters wrote without this option"


def write_layout_config(path: Path, layout: Layout) -> None:
    """Write ``config.json``; the file appears under its name only when it is whole."""
    write_json(path, layout_values(layout))


def layout_values(layout: Layout) -> dict[str, Any]:
    """Return ``config.json``; beside TensorRT-LLM's keys it has ``OWN_KEYS``, which TensorRT-LLM passes over."""
    config, speculation = layout.config, layout.speculation
    values = config_values(dataclasses.replace(config, share_embedding_table=False))
    values["mapping"] = layout.mapping.values()
    if speculation is None:
        return values
    values["max_draft_len"] = speculation.num_draft_tokens
    head = speculation.head
    if head.method == "medusa":
        if config.architecture in QWEN_TYPES:
            values["model_type"] = QWEN_TYPES[config.architecture]
        return values | {
            "architecture": MEDUSA,
            "num_medusa_heads": head.num_heads,
            "num_medusa_layers": head.num_layers,
        }
    return values | {
        "architecture": EAGLE,
        "num_eagle_layers": speculation.max_depth,
        "max_non_leaves_per_layer": speculation.max_non_leaves,
        "eagle_net_config": _network_values(layout, head),
    }


def _network_values(layout: Layout, head: HeadConfig) -> dict[str, Any]:
    network = CheckpointConfig(
        architecture=LLAMA,
        dtype=head.dtype,
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        num_hidden_layers=head.num_layers,
        num_attention_heads=head.num_attention_heads,
        num_key_value_heads=head.num_key_value_heads,
        head_size=head.head_size,
        intermediate_size=head.intermediate_size,
        norm_epsilon=head.norm_epsilon,
        rotary_base=head.rotary_base,
        rotary_scaling=head.rotary_scaling,
        max_position_embeddings=head.max_position_embeddings or layout.config.max_position_embeddings,
    )
    values = config_values(network) | {"mapping": layout.mapping.values()}
    return {key: value for key, value in values.items() if key not in OWN_KEYS}


def load_layout(directory: Path) -> Layout:
    """Read ``config.json``, ours or one that TensorRT-LLM's converters wrote; an absent key has their default.

    Of Medusa and EAGLE checkpoints the target is called Llama where it may also have been Mistral: the network is the
    same.

    Raises:
        CheckpointError: the file is missing, a key is missing or wrong, or the checkpoint is quantised or divided
            in another way.
    """
    raw = load_json(directory / CONFIG_FILE)
    given = JsonObject(raw.where, raw.get("mapping") or {})
    mapping = Mapping(given.integer("tp_size", 1), given.integer("pp_size", 1))
    if given.integer("world_size", 1) != mapping.world_size or given.integer("cp_size", 1) != 1:
        raise raw.error("mapping", "of tp_size * pp_size ranks", raw.get("mapping"))
    if any((raw.get("quantization") or {}).get(key) is not None for key in FIXED["quantization"]):
        raise raw.error("quantization", "without algorithms", raw.get("quantization"), _MERGED)
    for option in ("use_parallel_embedding", "share_embedding_table"):
        if raw.flag(option, False):
            raise raw.error(option, "false", True, _MERGED)
    architecture = raw.text("architecture")
    if architecture in (MEDUSA, EAGLE):
        architecture = _ARCHITECTURES[raw.text("qwen_type")] if raw.get("qwen_type") in _ARCHITECTURES else LLAMA
    config = parse_config(_completed(raw, architecture))
    return Layout(config, mapping, _speculation(raw, config))


def _completed(raw: JsonObject, architecture: str) -> JsonObject:
    """Fill in the defaults of the converters' configuration classes."""
    is_qwen = architecture in QWEN_TYPES
    heads = raw.integer("num_attention_heads")
    attn_bias = raw.flag(KEYS["qkv_bias"], architecture == "Qwen2ForCausalLM")
    defaults: dict[str, Any] = {
        "num_key_value_heads": heads,
        "head_size": raw.integer("hidden_size") // heads,
        "norm_epsilon": 1e-5,
        "rotary_base": 10000.0,
        KEYS["qkv_bias"]: attn_bias,
        "dense_bias": attn_bias and not is_qwen,
        "mlp_bias": False,
        KEYS["qk_norm"]: architecture == "Qwen3ForCausalLM",
        "share_embedding_table": False,
    }
    return JsonObject(raw.where, {**defaults, **raw.values, "architecture": architecture})


def _speculation(raw: JsonObject, config: CheckpointConfig) -> Speculation | None:
    if raw.text("architecture") == MEDUSA:
        head = HeadConfig(
            method="medusa",
            dtype=config.dtype,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            num_layers=raw.integer("num_medusa_layers", 1),
            num_heads=raw.integer("num_medusa_heads", 4),
        )
        return Speculation(head, raw.integer("max_draft_len", 63), head.num_heads)
    if raw.text("architecture") != EAGLE:
        return None
    inner = raw.get("eagle_net_config")
    if not isinstance(inner, dict):
        raise raw.error("eagle_net_config", "an object", inner)
    network = parse_config(_completed(JsonObject(raw.where, inner), LLAMA))
    head = HeadConfig(
        method="eagle1",
        dtype=network.dtype,
        vocab_size=network.vocab_size,
        hidden_size=network.hidden_size,
        target_hidden_size=config.hidden_size,
        num_layers=network.num_hidden_layers,
        draft_vocab_size=network.vocab_size,
        num_attention_heads=network.num_attention_heads,
        num_key_value_heads=network.num_key_value_heads,
        head_size=network.head_size,
        intermediate_size=network.intermediate_size,
        norm_epsilon=network.norm_epsilon,
        rotary_base=network.rotary_base,
        rotary_scaling=network.rotary_scaling,
        max_position_embeddings=network.max_position_embeddings,
        fc_bias=True,
        owns_embedding=True,
    )
    max_non_leaves = raw.integer("max_non_leaves_per_layer", MAX_NON_LEAVES_PER_LAYER)
    return Speculation(head, raw.integer("max_draft_len", 63), raw.integer("num_eagle_layers", 1), max_non_leaves)

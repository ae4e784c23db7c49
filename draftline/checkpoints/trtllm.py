"""Write and read TensorRT-LLM's checkpoint format: ``config.json`` and ``rank0.safetensors``.

Source: TensorRT-LLM's checkpoint documentation and the configuration classes of its LLaMA, Qwen, Gemma and Phi models.
Keys that TensorRT-LLM has keep its names; the table below is the only place where they are written. It ignores the
others.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from draftline.checkpoints.config import CheckpointConfig, Experts
from draftline.checkpoints.dtypes import EXPONENT_BITS
from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.huggingface_rotary import ROPE_TYPES
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "rank0.safetensors"

# Our field -> TensorRT-LLM's key, where they differ.
KEYS = {
    "qkv_bias": "attn_bias",
    "qk_norm": "qk_layernorm",
    "post_norms": "inter_layernorms",
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "rotary_fraction": "rotary_pct",
    "local_rotary_base": "rope_local_base_freq",
}
# Keys that are ours alone, in what is written for its routes.
OWN_KEYS = ("dense_bias", "sliding_window", "full_layers", "embedding_scale", "eos_token_ids")
# Fields that its classes of most architectures have not: written where they differ from their defaults.
FIELDS_OF_SOME = (
    "post_norms",
    "query_pre_attn_scalar",
    "attention_softcap",
    "attention_sinks",
    "logit_softcap",
    "rotary_fraction",
    "local_rotary_base",
)

# Always the same in what draftline writes.
FIXED: dict[str, Any] = {
    "logits_dtype": "float32",
    "position_embedding_type": "rope_gpt_neox",
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    "use_parallel_embedding": False,
    "embedding_sharding_dim": 0,
}
QWEN_TYPES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
# Of models with experts: the object and the key that say what ``Experts`` does.
MOE, MOE_WIDTH = "moe", "moe_intermediate_size"
HAS_BIASES, GATE_LIMIT = "has_biases", "gate_limit"  # ours, in that object where experts have them
NORMALIZATION_MODES = {0: False, 1: True}  # normalization_mode -> Experts.renormalises

_AGAIN = "convert the checkpoint again"


def write_checkpoint_config(path: Path, config: CheckpointConfig) -> None:
    """Write ``config.json``; the file appears under its name only when it is whole."""
    write_json(path, config_values(config))


def config_values(config: CheckpointConfig) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint for one rank."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values: dict[str, Any] = {
        KEYS.get(name, name): value
        for name, value in dataclasses.asdict(config).items()
        if name != "experts" and (name not in FIELDS_OF_SOME or value != defaults[name])
    }
    values |= FIXED | _experts_values(config.experts)
    if config.architecture in QWEN_TYPES:
        values["qwen_type"] = QWEN_TYPES[config.architecture]
    return values


def _experts_values(experts: Experts | None) -> dict[str, Any]:
    if experts is None:
        return {}
    modes = {renormalises: mode for mode, renormalises in NORMALIZATION_MODES.items()}
    moe = {
        "num_experts": experts.num_experts,
        "top_k": experts.per_token,
        "normalization_mode": modes[experts.renormalises],
    }
    own = {HAS_BIASES: experts.has_biases, GATE_LIMIT: experts.gate_limit}
    return {MOE: moe | {key: value for key, value in own.items() if value}, MOE_WIDTH: experts.intermediate_size}


def _parse_experts(raw: JsonObject) -> Experts | None:
    values = raw.get(MOE)
    if values is None:
        return None
    if not isinstance(values, dict) or values.get("normalization_mode") not in NORMALIZATION_MODES:
        known = ", ".join(map(str, NORMALIZATION_MODES))
        raise raw.error(MOE, f"an object whose normalization_mode is one of {known}", values, _AGAIN)
    moe = JsonObject(raw.where, values)
    renormalises = NORMALIZATION_MODES[values["normalization_mode"]]
    return Experts(
        moe.integer("num_experts"),
        moe.integer("top_k"),
        raw.integer(MOE_WIDTH),
        renormalises,
        moe.flag(HAS_BIASES, False),
        moe.optional_number(GATE_LIMIT),
    )


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object; the file appears under its name only when it is whole."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read the ``config.json`` of a converted checkpoint.

    Raises:
        CheckpointError: the folder is not a converted checkpoint, a key is missing or wrong, or the checkpoint is
            quantised or split over several ranks.
    """
    raw = load_json(directory / CONFIG_FILE)
    if not (directory / WEIGHTS_FILE).is_file():
        raise CheckpointError(directory, f"a converted checkpoint holds {WEIGHTS_FILE}", "no such file", _AGAIN)
    for key in ("mapping", "quantization"):
        if raw.get(key) != FIXED[key]:
            raise raw.error(key, f"{json.dumps(FIXED[key])}", raw.get(key), "convert for one rank, not quantised")
    return parse_config(raw)


def parse_config(raw: JsonObject) -> CheckpointConfig:
    """Return what ``config.json`` says of the model itself. Raises: CheckpointError where a key is missing or wrong."""
    for key, allowed in (("architecture", FAMILIES), ("dtype", EXPONENT_BITS)):
        if raw.text(key) not in allowed:
            raise raw.error(key, f"one of {', '.join(allowed)}", raw.get(key), _AGAIN)
    scaling = raw.get("rotary_scaling")
    if scaling is not None and not (isinstance(scaling, dict) and scaling.get("rope_type") in ROPE_TYPES):
        raise raw.error("rotary_scaling", f"null or of a rope_type among {', '.join(ROPE_TYPES)}", scaling, _AGAIN)
    return CheckpointConfig(
        architecture=raw.text("architecture"),
        dtype=raw.text("dtype"),
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        num_hidden_layers=raw.integer("num_hidden_layers"),
        num_attention_heads=raw.integer("num_attention_heads"),
        num_key_value_heads=raw.integer("num_key_value_heads"),
        head_size=raw.integer("head_size"),
        intermediate_size=raw.integer("intermediate_size"),
        norm_epsilon=raw.number("norm_epsilon"),
        rotary_base=raw.number("rotary_base"),
        max_position_embeddings=raw.integer("max_position_embeddings"),
        hidden_act=raw.text("hidden_act"),
        rotary_scaling=scaling,
        qkv_bias=raw.flag(KEYS["qkv_bias"]),
        dense_bias=raw.flag("dense_bias"),
        mlp_bias=raw.flag("mlp_bias"),
        qk_norm=raw.flag(KEYS["qk_norm"]),
        share_embedding_table=raw.flag("share_embedding_table"),
        experts=_parse_experts(raw),
        sliding_window=raw.optional_integer("sliding_window"),
        full_layers=raw.integers("full_layers"),
        eos_token_ids=raw.integers("eos_token_ids"),
        post_norms=raw.flag(KEYS["post_norms"], False),
        embedding_scale=raw.number("embedding_scale", 1.0),
        query_pre_attn_scalar=raw.optional_number("query_pre_attn_scalar"),
        attention_softcap=raw.optional_number(KEYS["attention_softcap"]),
        logit_softcap=raw.optional_number(KEYS["logit_softcap"]),
        attention_sinks=raw.flag("attention_sinks", False),
        rotary_fraction=raw.number(KEYS["rotary_fraction"], 1.0),
        local_rotary_base=raw.optional_number(KEYS["local_rotary_base"]),
    )

"""Hugging Face's ``config.json`` to ``CheckpointConfig``.

Source: the configuration classes of transformers 4 and 5 (``configuration_llama.py`` and its siblings,
``modeling_rope_utils.py``). A key that is absent has the value the class of that architecture gives it; keys that every
published checkpoint has are required. What the graphs cannot compute is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """What an architecture adds to or fixes in LLaMA's network; None = the key in ``config.json`` decides."""

    model_type: str
    qkv_bias: bool | None = False
    dense_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    heads_default_to_all: bool = False  # num_key_value_heads absent = num_attention_heads
    head_dim_required: bool = False  # the class's own default is not hidden_size / num_attention_heads
    window_default: int | None = None  # sliding_window absent
    window_switch: bool = False  # use_sliding_window, max_window_layers, layer_types decide


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, dense_bias=None, mlp_bias=None, heads_default_to_all=True),
    "MistralForCausalLM": Family("mistral", window_default=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_default=4096, window_switch=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias=None,
        dense_bias=None,
        qk_norm=True,
        head_dim_required=True,
        window_default=4096,
        window_switch=True,
    ),
}

DEFAULT_ROTARY_BASE = 10000.0  # of all four classes
DEFAULT_MAX_WINDOW_LAYERS = 28  # of both Qwen classes: the layers before it attend to everything

# rope_type -> (required numbers, optional keys). `original_max_position_embeddings` is filled in for the types that use
# it, as transformers does.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ("original_max_position_embeddings",)),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn")


def parse_huggingface_config(config: JsonObject, generation: JsonObject | None, dtype: str) -> CheckpointConfig:
    """Turn ``config.json`` into a ``CheckpointConfig`` whose tensors will have ``dtype``.

    ``generation`` is ``generation_config.json`` where present: its ``eos_token_id`` replaces the one of
    ``config.json``, as in ``generate``.

    Raises:
        CheckpointError: a key is missing or of the wrong type, or the model needs something that is not supported.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    if config.get("quantization_config") is not None:
        method = (config.get("quantization_config") or {}).get("quant_method", "unknown")
        cure = "use the checkpoint it was quantised from; engine.weights_dtype quantises"
        raise CheckpointError(config.where, "quantization_config is absent", f"quant_method {method!r}", cure)
    if config.get("hidden_act") not in (None, "silu"):
        cure = "only SwiGLU networks are supported; choose another model"
        raise config.error("hidden_act", '"silu"', config.get("hidden_act"), cure)
    hidden_size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads if family.heads_default_to_all else None)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    rotary_base, rotary_scaling = _rotary(config)
    qkv_bias, dense_bias = (
        config.flag("attention_bias", False) if bias is None else bias for bias in (family.qkv_bias, family.dense_bias)
    )
    end_ids = generation.integers("eos_token_id") if generation else ()
    return CheckpointConfig(
        architecture=architecture,
        dtype=dtype,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=_head_size(config, family, hidden_size, heads),
        intermediate_size=config.integer("intermediate_size"),
        norm_epsilon=config.number("rms_norm_eps"),
        rotary_base=rotary_base,
        max_position_embeddings=config.integer("max_position_embeddings"),
        rotary_scaling=rotary_scaling,
        qkv_bias=qkv_bias,
        dense_bias=dense_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        share_embedding_table=config.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(config, family),
        eos_token_ids=end_ids or config.integers("eos_token_id"),
    )


def _architecture(config: JsonObject) -> str:
    names = config.get("architectures")
    if names is None:
        model_type = config.get("model_type")
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type] or model_type
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        raise config.error("architectures", f"one of {', '.join(FAMILIES)}", names, "choose a supported model")
    return str(names[0])


def _head_size(config: JsonObject, family: Family, hidden_size: int, heads: int) -> int:
    if config.get("head_dim") is None and not family.head_dim_required:
        if hidden_size % heads:
            rule = f"a multiple of num_attention_heads ({heads}) where head_dim is absent"
            raise config.error("hidden_size", rule, hidden_size)
        head_size = hidden_size // heads
    else:
        head_size = config.integer("head_dim")
    if head_size % 2:
        raise config.error("head_dim", "even, as rotary embeddings need", head_size)
    return head_size


def _sliding_window(config: JsonObject, family: Family) -> int | None:
    layers = config.integer("num_hidden_layers")
    has_window = "sliding_window" in config.values  # null is a value here: no window
    window = config.optional_integer("sliding_window") if has_window else family.window_default
    if family.window_switch and not config.flag("use_sliding_window", False):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None and family.window_switch and window is not None:
        first = config.values.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if type(first) is not int:
            raise config.error("max_window_layers", "an integer", first)
        layer_types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    kinds = set(layer_types if layer_types is not None else ["sliding_attention" if window else "full_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"} or window is None:
        got = f"layers of kinds {sorted(map(str, kinds))} with sliding_window {window}"
        cure = "choose a model whose layers are all alike, or set use_sliding_window to false for short texts"
        raise CheckpointError(config.where, "all layers attend to one window, or all to everything", got, cure)
    return window


def _rotary(config: JsonObject) -> tuple[float, dict[str, Any] | None]:
    """Return the base and, unless the type is ``default``, the scaling mapping; both spellings are read."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise config.error("rope_scaling", "an object", given)
    if any(isinstance(value, Mapping) for value in given.values()):
        raise config.error("rope_parameters", "one mapping for all layers", given, "choose a supported model")
    parameters = JsonObject(config.where, {key: value for key, value in given.items() if value is not None})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    base = parameters.number("rope_theta", config.number("rope_theta", DEFAULT_ROTARY_BASE))
    for owner in (config, parameters):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise config.error("partial_rotary_factor", "1", owner.get("partial_rotary_factor"), "choose another model")
    if rope_type == "default":
        return base, None
    if rope_type not in ROPE_TYPES:
        raise config.error("rope_type", f"one of default, {', '.join(ROPE_TYPES)}", rope_type, "choose another model")
    required, optional = ROPE_TYPES[rope_type]
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in required:
        fallback = config.number("max_position_embeddings") if rope_type in NEEDS_ORIGINAL_LENGTH else None
        scaling[key] = parameters.number(key, fallback if key == "original_max_position_embeddings" else None)
    for key in optional:
        if parameters.get(key) is not None:
            scaling[key] = parameters.flag(key) if key == "truncate" else parameters.number(key)
    known = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *required, *optional}
    unknown = sorted(set(parameters.values) - known)
    if unknown:
        got = f"unknown keys {', '.join(unknown)}"
        raise CheckpointError(config.where, f"rope_scaling of type {rope_type} has known keys", got, "remove the keys")
    return base, scaling

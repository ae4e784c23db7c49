"""What ``config.json`` of an EAGLE head says of its layers, and what it must not contradict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.eagle_layouts import EagleLayout
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.target_sizes import TargetSizes
from draftline.errors import CheckpointError

CHOOSE = "choose the head that was trained for this target"

# The keys that heads share with Llama. The others there were copied from the target and mean nothing to a head.
_LLAMA_KEYS = (
    "hidden_act",
    "hidden_size",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)

# speculators leaves out what equals the default of the layer's class in transformers.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 32000,
    },
    "qwen3": {
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
    },
}


def parse_layers(raw: JsonObject, layout: EagleLayout, target: TargetSizes, dtype: str) -> CheckpointConfig:
    """Return the head's layers as those of a Llama, whose biases and norms are yet to be read from its tensors.

    Its ``vocab_size`` may be more than the target's: then the last rows are padding.

    Raises: CheckpointError where they do not fit the target.
    """
    layers = speculators_layers(raw) if layout.is_nested else raw
    if layers.get("quantization_config") is not None:
        cure = "use the head it was quantised from; draft.weights_dtype quantises"
        raise layers.error("quantization_config", "absent: quantised heads are not read", "one", cure)
    values = {key: layers.values[key] for key in _LLAMA_KEYS if key in layers.values}
    llama = parse_huggingface_config(
        JsonObject(raw.where, values | {"architectures": ["LlamaForCausalLM"]}), None, dtype
    )
    if llama.vocab_size < target.vocab_size:
        raise raw.error("vocab_size", f"the target's ({target.vocab_size}), or more rows", llama.vocab_size, CHOOSE)
    if layout.method == "eagle1" and llama.hidden_size != target.hidden_size:
        raise raw.error("hidden_size", f"the target's ({target.hidden_size})", llama.hidden_size, CHOOSE)
    if raw.integer("target_hidden_size", target.hidden_size) != target.hidden_size:
        rule = f"the target's hidden_size ({target.hidden_size})"
        raise raw.error("target_hidden_size", rule, raw.get("target_hidden_size"), CHOOSE)
    return llama


def check_layernorms(raw: JsonObject, layout: EagleLayout) -> None:
    """Raise CheckpointError for a head of speculators that norms its embedding and its output, as HASS does."""
    if layout.method == "eagle1" and layout.is_nested and raw.flag("layernorms", False):
        cure = "choose a head without norms of its embedding and output"
        raise raw.error("layernorms", "false or absent, as the network of EAGLE-1 has it", True, cure)


def check_eagle1(config: HeadConfig, raw: JsonObject, layout: EagleLayout) -> None:
    """Raise CheckpointError where ``config.json`` contradicts the tensors about a bias."""
    key, if_absent = layout.bias_key
    if raw.flag(key, if_absent) != config.fc_bias:
        absent = "true" if if_absent else "false"
        rule = f"config.json says in {key} whether there is {layout.fc}.bias, {absent} where it says nothing"
        got = f"{key} {str(raw.flag(key, if_absent)).lower()} and {'an' if config.fc_bias else 'no'} {layout.fc}.bias"
        raise CheckpointError(raw.where, rule, got, "correct the file or fetch the checkpoint again")
    if raw.get("qkv_bias") is not None and raw.flag("qkv_bias") != config.qkv_bias:
        rule = f"{str(config.qkv_bias).lower()}, as the tensors of self_attn.q_proj have it"
        raise raw.error("qkv_bias", rule, raw.get("qkv_bias"))


def check_borrowed(config: HeadConfig, raw: JsonObject) -> HeadConfig:
    """Check that what a head has not is the target's to lend; return it with a note of a tie that means nothing.

    Raises: CheckpointError where a tensor is missing that the target has in another shape only.
    """
    fits = config.hidden_size == config.target_hidden_size
    if not fits and not config.owns_embedding:
        size = config.target_hidden_size
        rule = f"embed_tokens.weight is in the head where its hidden_size is not the target's {size}"
        raise CheckpointError(raw.where, rule, f"hidden_size {config.hidden_size} without it", CHOOSE)
    if not config.owns_lm_head and (not fits or config.draft_vocab_size != config.vocab_size):
        rule = "lm_head.weight is in the head where its hidden_size or vocabulary is not the target's"
        got = f"hidden_size {config.hidden_size} and draft_vocab_size {config.draft_vocab_size} without it"
        raise CheckpointError(raw.where, rule, got, "fetch the whole checkpoint")
    if not raw.flag("tie_word_embeddings", False):
        return config
    if config.owns_embedding and not config.owns_lm_head:
        rule = "lm_head.weight is in the head where tie_word_embeddings is true and it has its own embed_tokens.weight"
        raise CheckpointError(raw.where, rule, "no lm_head.weight", "set it to false to borrow the target's lm_head")
    where = "in the head" if config.owns_lm_head else "the target's"
    return replace(config, notes=(*config.notes, f"tie_word_embeddings true ties nothing: lm_head is {where}"))


def speculators_layers(raw: JsonObject) -> JsonObject:
    """Return the inner configuration, with what it leaves out. Raises: CheckpointError for layers of another kind."""
    given = raw.get("transformer_layer_config")
    if not isinstance(given, dict):
        raise raw.error("transformer_layer_config", "an object", given)
    model_type = given.get("model_type", "llama")
    if model_type not in _CLASS_DEFAULTS:
        rule = f"of a model_type among {', '.join(_CLASS_DEFAULTS)}"
        raise raw.error("transformer_layer_config", rule, model_type, "choose a head of such layers")
    if "sliding_attention" in (given.get("layer_types") or ()):
        rule = "without layers of sliding_attention"
        raise raw.error("transformer_layer_config", rule, given["layer_types"], "choose a head of full attention")
    return JsonObject(raw.where, _CLASS_DEFAULTS[model_type] | given)

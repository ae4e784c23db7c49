"""Hugging Face's ``config.json`` to ``CheckpointConfig``.

Source: the configuration classes of transformers 4 and 5 (``configuration_llama.py`` and its siblings). A key that is
absent has the value the class of that architecture gives it; keys that every published checkpoint has are required.
What the graphs cannot compute is refused by name.
"""

from __future__ import annotations

import numpy as np

from draftline.checkpoints.config import GATE_SLOPE, CheckpointConfig, Experts
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.families import FAMILIES, Family
from draftline.checkpoints.huggingface_rotary import parse_rotary
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.refused_architectures import check_architecture
from draftline.errors import CheckpointError

DEFAULT_MAX_WINDOW_LAYERS = 28  # of both Qwen classes: the layers before it attend to everything
FULL, WINDOWED = "full_attention", "sliding_attention"


def parse_huggingface_config(config: JsonObject, generation: JsonObject | None, dtype: str) -> CheckpointConfig:
    """Turn ``config.json`` into a ``CheckpointConfig`` whose tensors will have ``dtype``.

    ``generation`` is ``generation_config.json`` where present: its ``eos_token_id`` replaces the one of
    ``config.json``, as in ``generate``. The root of ``hidden_size`` that scales Gemma's embedding is rounded to
    ``dtype``, as transformers rounds it to the dtype that a model is loaded in.

    Raises:
        CheckpointError: a key is missing or of the wrong type, or the model needs something that is not supported.
    """
    architecture = check_architecture(config)
    family = FAMILIES[architecture]
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false", True, "choose a model that generates text")
    hidden_size, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads if family.heads_default_to_all else None)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", kv_heads)
    head_size = _head_size(config, family, hidden_size, heads)
    window, full_layers = _windows(config, family)
    rotary = parse_rotary(config, family, head_size, has_windows=window is not None)
    qkv_bias, dense_bias = (
        config.flag("attention_bias", family.attention_bias_default) if bias is None else bias
        for bias in (family.qkv_bias, family.dense_bias)
    )
    attention_softcap, logit_softcap = _softcaps(config, family)
    end_ids = generation.integers("eos_token_id") if generation else ()
    return CheckpointConfig(
        architecture=architecture,
        dtype=dtype,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_hidden_layers=config.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=head_size,
        intermediate_size=config.integer("intermediate_size"),
        norm_epsilon=config.number("rms_norm_eps"),
        rotary_base=rotary.base,
        max_position_embeddings=config.integer("max_position_embeddings"),
        hidden_act=_activation(config, family),
        rotary_scaling=rotary.scaling,
        qkv_bias=qkv_bias,
        dense_bias=dense_bias,
        mlp_bias=config.flag("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        share_embedding_table=config.flag("tie_word_embeddings", family.tied_default),
        experts=_experts(config, family),
        sliding_window=window,
        full_layers=full_layers,
        eos_token_ids=end_ids or config.integers("eos_token_id"),
        post_norms=family.post_norms,
        embedding_scale=_rounded(hidden_size**0.5, dtype) if family.scales_embedding else 1.0,
        query_pre_attn_scalar=config.number("query_pre_attn_scalar") if family.scales_queries else None,
        attention_softcap=attention_softcap,
        logit_softcap=logit_softcap,
        attention_sinks=family.attention_sinks,
        rotary_fraction=rotary.fraction,
        local_rotary_base=rotary.local_base,
    )


def _rounded(value: float, dtype: str) -> float:
    return float(np.array(value).astype(numpy_dtype(dtype)).astype(np.float64))


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


def _activation(config: JsonObject, family: Family) -> str:
    """Return the activation's name in ``CheckpointConfig``; ``hidden_activation`` goes before ``hidden_act``."""
    key = "hidden_act" if config.get("hidden_activation") is None else "hidden_activation"
    if config.get(key) not in (None, *family.activations):
        wanted = " or ".join(f'"{name}"' for name in family.activations)
        raise config.error(key, wanted, config.get(key), "choose another model: others gate their MLP in this way")
    return family.activations[0]


def _softcaps(config: JsonObject, family: Family) -> tuple[float | None, float | None]:
    if family.softcaps is None:
        return None, None
    of_scores, of_logits = family.softcaps
    return (
        config.optional_number("attn_logit_softcapping", of_scores),
        config.optional_number("final_logit_softcapping", of_logits),
    )


def _experts(config: JsonObject, family: Family) -> Experts | None:
    if family.experts_width is None:
        return None
    # transformers 5 writes num_local_experts of every architecture, earlier ones num_experts of Qwen's.
    num_experts = config.optional_integer("num_local_experts") or config.integer("num_experts")
    if config.optional_integer("num_experts") not in (None, num_experts):
        raise config.error("num_experts", f"num_local_experts ({num_experts})", config.get("num_experts"))
    per_token = config.integer("num_experts_per_tok")
    if per_token > num_experts:
        raise config.error("num_experts_per_tok", f"at most the number of experts ({num_experts})", per_token)
    step, dense_layers = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers")
    if step != 1 or dense_layers not in (None, []):
        got, cure = f"decoder_sparse_step {step}, mlp_only_layers {dense_layers}", "choose a model without dense layers"
        raise CheckpointError(config.where, "every layer has experts", got, cure)
    renormalises = config.flag("norm_topk_prob", False) if family.renormalises is None else family.renormalises
    return Experts(
        num_experts,
        per_token,
        config.integer(family.experts_width),
        renormalises,
        has_biases=family.expert_biases,
        gate_limit=None if family.gate_limit is None else _gate_limit(config, family.gate_limit),
    )


def _gate_limit(config: JsonObject, default: float) -> float:
    slope = config.number("swiglu_alpha", GATE_SLOPE)
    if slope != GATE_SLOPE:
        raise config.error("swiglu_alpha", str(GATE_SLOPE), slope, "choose another model")
    return config.number("swiglu_limit", default)


def _windows(config: JsonObject, family: Family) -> tuple[int | None, tuple[int, ...]]:
    """Return the window, and the layers that have none where others have it."""
    has_window = "sliding_window" in config.values  # null is a value here: no window
    window = config.optional_integer("sliding_window") if has_window else family.window_default
    if family.window_switch and not config.flag("use_sliding_window", False):
        window = None
    elif family.window_switch and family.experts_width is not None:
        cure = "set it to false for short texts: releases of transformers disagree on the layers that have a window"
        raise config.error("use_sliding_window", "false", True, cure)
    kinds = _layer_kinds(config, family, window)
    if WINDOWED in kinds and window is None:
        raise config.error("sliding_window", "a length where layers have windows", None)
    full_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    return (None, ()) if len(full_layers) == len(kinds) else (window, full_layers)


def _layer_kinds(config: JsonObject, family: Family, window: int | None) -> list[str]:
    num_layers, given = config.integer("num_hidden_layers"), config.get("layer_types")
    uniform = [FULL if window is None else WINDOWED] * num_layers
    if given is not None:
        if not isinstance(given, list) or len(given) != num_layers or not {FULL, WINDOWED}.issuperset(map(str, given)):
            rule = f"a list of {num_layers} times {FULL} or {WINDOWED}"
            raise config.error("layer_types", rule, given, "choose another model")
        if not family.has_layer_types and given != uniform:
            cure = (
                'choose another model; of a Mistral that was trained so set architectures to ["MinistralForCausalLM"]'
            )
            raise config.error("layer_types", f"absent in a {family.model_type}, whose layers are alike", given, cure)
        return given
    if family.full_every is not None:
        every = config.integer(family.full_every_key, family.full_every) if family.full_every_key else family.full_every
        return [FULL if (layer + 1) % every == 0 else WINDOWED for layer in range(num_layers)]
    if family.window_switch and window is not None:
        first = config.values.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if type(first) is not int:
            raise config.error("max_window_layers", "an integer", first)
        return [FULL if layer < first else WINDOWED for layer in range(num_layers)]
    return uniform

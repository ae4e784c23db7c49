"""The architectures that the graphs compute, as a table.

Source: the configuration and model classes of transformers 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """What an architecture adds to or fixes in LLaMA's network; None = the key in ``config.json`` decides."""

    model_type: str
    qkv_bias: bool | None = False
    dense_bias: bool | None = False
    attention_bias_default: bool = False  # attention_bias absent
    attention_sinks: bool = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    post_norms: bool = False
    norms_add_one: bool = False  # a norm multiplies by 1 + its weight
    joined_sources: bool = False  # q, k, v are one tensor of the source, and gate and up another
    heads_default_to_all: bool = False  # num_key_value_heads absent = num_attention_heads
    head_dim_required: bool = False  # the class's own default is not hidden_size / num_attention_heads
    tied_default: bool = False  # tie_word_embeddings absent
    scales_embedding: bool = False  # by the root of hidden_size
    activations: tuple[str, ...] = ("silu",)  # what the MLP's activation may be called; the first is its name
    scales_queries: bool = False  # query_pre_attn_scalar in the place of head_dim
    softcaps: tuple[float | None, float | None] | None = None  # of scores and logits where absent; None = no such keys
    window_default: int | None = None  # sliding_window absent
    window_switch: bool = False  # use_sliding_window and max_window_layers decide
    has_layer_types: bool = False  # layer_types decides which layers have the window
    full_every: int | None = None  # layer_types absent: each so many-th layer attends to everything
    full_every_key: str | None = None  # the key of its number
    rotary_base: float = 10000.0  # rope_theta absent
    local_rotary_base: float | None = None  # rope_local_base_freq absent; None = windows change no rotary embedding
    partial_rotary: bool = False  # partial_rotary_factor may be less than 1
    rope_aliases: tuple[tuple[str, str], ...] = ()  # other names of rope_type
    rope_required: bool = False  # the class's own default scales
    experts_width: str | None = None  # the key of the width of an expert's MLP; None = there are no experts
    renormalises: bool | None = None  # of experts: the weights of those chosen; None = norm_topk_prob decides
    expert_biases: bool = False  # of experts and of their router
    gate_limit: float | None = None  # swiglu_limit absent; None = gates are not clamped


_QWEN3 = Family(
    "qwen3",
    qkv_bias=None,
    dense_bias=None,
    qk_norm=True,
    head_dim_required=True,
    window_default=4096,
    window_switch=True,
    has_layer_types=True,
)
_GEMMA2 = Family(
    "gemma2",
    qkv_bias=None,
    dense_bias=None,
    post_norms=True,
    norms_add_one=True,
    head_dim_required=True,
    tied_default=True,
    scales_embedding=True,
    activations=("gelu_pytorch_tanh",),
    scales_queries=True,
    softcaps=(50.0, 30.0),
    window_default=4096,
    has_layer_types=True,
    full_every=2,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, dense_bias=None, mlp_bias=None, heads_default_to_all=True),
    "MistralForCausalLM": Family("mistral", window_default=4096),
    "MinistralForCausalLM": Family("ministral", window_default=4096, has_layer_types=True),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window_default=4096, window_switch=True, has_layer_types=True),
    "Qwen3ForCausalLM": _QWEN3,
    "GemmaForCausalLM": Family(
        "gemma",
        qkv_bias=None,
        dense_bias=None,
        norms_add_one=True,
        head_dim_required=True,
        tied_default=True,
        scales_embedding=True,
        # The first releases say gelu and mean its approximation by tanh.
        activations=("gelu_pytorch_tanh", "gelu"),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2,
        model_type="gemma3_text",
        qk_norm=True,
        softcaps=(None, None),
        full_every=6,
        full_every_key="sliding_window_pattern",
        rotary_base=1e6,
        local_rotary_base=1e4,
    ),
    "MixtralForCausalLM": Family("mixtral", rotary_base=1e6, experts_width="intermediate_size", renormalises=True),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qkv_bias=None,
        dense_bias=None,
        qk_norm=True,
        window_switch=True,
        experts_width="moe_intermediate_size",
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        qkv_bias=None,
        dense_bias=None,
        attention_bias_default=True,
        attention_sinks=True,
        head_dim_required=True,
        window_default=128,
        has_layer_types=True,
        full_every=2,
        rotary_base=150000.0,
        rope_required=True,
        experts_width="intermediate_size",
        renormalises=True,
        expert_biases=True,
        gate_limit=7.0,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        joined_sources=True,
        heads_default_to_all=True,
        partial_rotary=True,
        rope_aliases=(("su", "longrope"), ("yarn", "longrope")),
    ),
}

"""What a converted checkpoint says about its model: the fields of TensorRT-LLM's ``config.json`` that graphs need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GATE_SLOPE = 1.702  # of clamped gates: x sigmoid(1.702 x) is nearly GELU (arXiv 1606.08415)


@dataclass(frozen=True)
class Experts:
    """The MLPs of every layer, of which a row goes through the ``per_token`` that the router gives most to.

    Their weights are the softmax of the router's logits; ``renormalises``: those chosen are divided by their sum.
    ``has_biases``: of the router and of every expert. ``gate_limit`` c: MLPs are gated by
    min(gate, c) sigmoid(``GATE_SLOPE`` min(gate, c)) times 1 + up, with up between -c and c.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    renormalises: bool
    has_biases: bool = False
    gate_limit: float | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """A decoder-only model in TensorRT-LLM's words (its ``config.json``; see ``trtllm.py`` for reading and writing).

    ``head_size`` may differ from ``hidden_size / num_attention_heads``. ``rotary_scaling`` is Hugging Face's
    ``rope_scaling`` mapping with the key ``rope_type`` (one of ``ROPE_TYPES``) or None. A softcap c of x is
    c tanh(x / c). With ``experts`` no layer has an MLP of ``intermediate_size``.
    """

    architecture: str  # one of ``FAMILIES``
    dtype: str  # float32 | float16 | bfloat16: the dtype of the tensors in rank0.safetensors
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    rotary_base: float
    max_position_embeddings: int
    hidden_act: str = "silu"  # or gelu_pytorch_tanh: what gates the MLP
    rotary_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False  # attention.qkv.bias (Qwen2; Llama with attention_bias has dense.bias as well)
    dense_bias: bool = False  # attention.dense.bias
    mlp_bias: bool = False
    qk_norm: bool = False  # attention.q_layernorm / k_layernorm over head_size (Qwen3)
    share_embedding_table: bool = False  # lm_head.weight is absent: the embedding serves
    experts: Experts | None = None
    sliding_window: int | None = None  # layers attend to the last `sliding_window` tokens, itself included
    full_layers: tuple[int, ...] = ()  # layers that attend to everything, beside those with the window
    eos_token_ids: tuple[int, ...] = field(default=())
    post_norms: bool = False  # norms behind attention and behind the MLP, before each is added (Gemma 2 and 3)
    embedding_scale: float = 1.0  # of the target's own embedding (Gemma); drafts that borrow it do not scale
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None = head_size
    attention_softcap: float | None = None  # of scores
    logit_softcap: float | None = None
    attention_sinks: bool = False  # attention.sinks: a score of each head beside those of its keys (gpt-oss)
    rotary_fraction: float = 1.0  # the share of a head that is rotated, its first elements
    local_rotary_base: float | None = None  # of layers with the window, which scale nothing; None = as the others

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_size * self.rotary_fraction)

    def window(self, layer: int) -> int:
        """Return how many tokens a layer attends to; 0 = all."""
        return 0 if layer in self.full_layers else self.sliding_window or 0

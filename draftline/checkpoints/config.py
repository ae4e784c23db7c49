"""What a converted checkpoint says about its model: the fields of TensorRT-LLM's ``config.json`` that graphs need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CheckpointConfig:
    """A decoder-only model in TensorRT-LLM's words (its ``config.json``; see ``trtllm.py`` for reading and writing).

    ``head_size`` may differ from ``hidden_size / num_attention_heads``. ``rotary_scaling`` is Hugging Face's
    ``rope_scaling`` mapping with the key ``rope_type`` (``linear``, ``dynamic``, ``llama3``, ``yarn``) or None.
    """

    architecture: str  # LlamaForCausalLM | MistralForCausalLM | Qwen2ForCausalLM | Qwen3ForCausalLM
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
    hidden_act: str = "silu"
    rotary_scaling: dict[str, Any] | None = None
    qkv_bias: bool = False  # attention.qkv.bias (Qwen2; Llama with attention_bias has dense.bias as well)
    dense_bias: bool = False  # attention.dense.bias
    mlp_bias: bool = False
    qk_norm: bool = False  # attention.q_layernorm / k_layernorm over head_size (Qwen3)
    share_embedding_table: bool = False  # lm_head.weight is absent: the embedding serves
    sliding_window: int | None = None  # every layer attends to the last `sliding_window` tokens, itself included
    eos_token_ids: tuple[int, ...] = field(default=())

"""What a converted draft checkpoint says about its heads: ``config.json`` beside ``rank0.safetensors``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

HeadMethod = Literal["eagle1", "eagle3", "medusa"]
FeatureNorm = Literal["none", "joined", "each"]


@dataclass(frozen=True)
class HeadConfig:
    """Heads that read the target's features. A draft model has no such file: its checkpoint is a target's.

    Tensors of ``eagle1`` and ``eagle3`` (linear weights are [out, in]; L = 0 .. num_layers - 1):
    ``fc.weight`` (``fc.bias``), ``layers.L.attention.qkv.weight`` (``.bias``), ``layers.L.attention.dense.weight``
    (``.bias``), ``layers.L.attention.q_layernorm.weight`` and ``k_layernorm`` with ``qk_norm``,
    ``layers.L.post_layernorm.weight``, ``layers.L.mlp.fc.weight``, ``layers.L.mlp.gate.weight`` (side by side, fc is
    gate_proj), ``layers.L.mlp.proj.weight`` (``.bias`` each); ``layers.L.input_layernorm.weight`` (eagle3; eagle1 from
    layer 1 on); eagle3 also ``layers.0.hidden_norm.weight``, ``ln_f.weight``, ``input_norm.weight`` or
    ``fc_norm.I.weight`` as ``feature_norm`` says, and ``d2t int64`` (offsets: target id = draft id + d2t[draft id])
    where its vocabulary is not the target's; ``vocab_embedding.weight``, ``lm_head.weight`` where not borrowed from the
    target.

    Tensors of ``medusa``: ``medusa_heads.H.medusa_layers.L.linear.weight`` and ``.bias``,
    ``medusa_heads.H.lm_head.weight``.
    """

    method: HeadMethod
    dtype: str
    vocab_size: int  # of the target
    hidden_size: int  # of the head
    target_hidden_size: int
    num_layers: int  # transformer layers of an EAGLE head; residual blocks of each Medusa head
    num_heads: int = 0  # Medusa heads
    draft_vocab_size: int = 0  # rows of the EAGLE head's lm_head; 0 for Medusa
    captured_layers: tuple[int, ...] = ()  # eagle3: the features are the outputs of these target layers, 0-based
    captured_layer_readings: tuple[tuple[int, ...], ...] = ()  # where its source leaves several open; the first is used
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_size: int = 0
    intermediate_size: int = 0
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rotary_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 0  # 0 = no limit of its own
    fc_bias: bool = False
    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    feature_norm: FeatureNorm = "none"  # before fc: of the features joined, or of each captured layer's alone
    norm_before_residual: bool = False  # the first layer's residual is what hidden_norm gives, not what it reads
    feeds_normed: bool = False  # the next depth is fed with the output after the final norm
    owns_embedding: bool = False
    owns_lm_head: bool = False
    owns_medusa_biases: bool = True  # of the linear layers of residual blocks
    owns_medusa_lm_heads: bool = True  # False: each Medusa head ends in the target's lm_head
    layout: str = ""  # the row of the import matrix that it was read by; "" of heads that were not imported
    notes: tuple[str, ...] = ()  # what its reader decided where the source can be read in more than one way

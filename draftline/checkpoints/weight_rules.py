"""The table of weights, as data: what TensorRT-LLM calls each tensor, and what Hugging Face does.

Source: ``convert_hf_llama`` and the Qwen loader of TensorRT-LLM. Traps: ``mlp.fc`` is Hugging Face's ``gate_proj`` and
``mlp.gate`` its ``up_proj``, but of experts ``mlp.fc`` is ``up_proj`` above ``gate_proj``; ``attention.qkv`` is q, k, v
joined along rows; ``post_layernorm`` is the norm before the MLP, but behind attention where there are norms behind both
(Gemma 2 and 3). Linear weights are [out, in] on both sides, but of gpt-oss's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from draftline.checkpoints.config import CheckpointConfig


@dataclass(frozen=True)
class WeightRule:
    """One row of the table: ``sources`` joined along rows become ``key``.

    ``rows`` gives the symbolic row count of each source, ``columns`` is None for vectors. ``when`` names the field of
    ``CheckpointConfig`` that must be true, with ``not `` for one that must be false. ``part`` (i, n): ``key`` is the
    part i of n equal ones of its source's rows. ``is_norm``: of an RMS norm. ``num_matrices``: ``key`` is so many
    matrices, ``[matrices, rows, columns]``, and each has as many of the rows. ``num_in_turn`` k: the one source is
    those matrices transposed, ``[matrices, columns, k * rows]``, and rows of k kinds take turns; the last kind goes on
    top.
    """

    key: str
    sources: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None = None
    when: str | None = None
    part: tuple[int, int] = (0, 1)
    is_norm: bool = False
    num_matrices: int | None = None
    num_in_turn: int = 0


def _norm(key: str, source: str, rows: str = "hidden", when: str | None = None) -> WeightRule:
    return WeightRule(f"{key}.weight", (f"{source}.weight",), (rows,), when=when, is_norm=True)


_QKV = ("q", "kv", "kv")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

EMBEDDING = WeightRule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",), ("vocab",), "hidden")
LAYER_RULES: tuple[WeightRule, ...] = (
    _norm("input_layernorm", "input_layernorm"),
    WeightRule("attention.qkv.weight", tuple(f"{name}.weight" for name in _PROJECTIONS), _QKV, "hidden"),
    WeightRule("attention.qkv.bias", tuple(f"{name}.bias" for name in _PROJECTIONS), _QKV, when="qkv_bias"),
    _norm("attention.q_layernorm", "self_attn.q_norm", "head", when="qk_norm"),
    _norm("attention.k_layernorm", "self_attn.k_norm", "head", when="qk_norm"),
    WeightRule("attention.dense.weight", ("self_attn.o_proj.weight",), ("hidden",), "q"),
    WeightRule("attention.dense.bias", ("self_attn.o_proj.bias",), ("hidden",), when="dense_bias"),
    WeightRule("attention.sinks", ("self_attn.sinks",), ("heads",), when="attention_sinks"),
    _norm("post_layernorm", "post_attention_layernorm"),
    _norm("pre_feedforward_layernorm", "pre_feedforward_layernorm", when="post_norms"),
    # fc and gate are neighbours in the file, so one initializer of a graph may span both.
    WeightRule("mlp.fc.weight", ("mlp.gate_proj.weight",), ("ffn",), "hidden", when="not experts"),
    WeightRule("mlp.gate.weight", ("mlp.up_proj.weight",), ("ffn",), "hidden", when="not experts"),
    WeightRule("mlp.fc.bias", ("mlp.gate_proj.bias",), ("ffn",), when="mlp_bias"),
    WeightRule("mlp.gate.bias", ("mlp.up_proj.bias",), ("ffn",), when="mlp_bias"),
    WeightRule("mlp.proj.weight", ("mlp.down_proj.weight",), ("hidden",), "ffn", when="not experts"),
    WeightRule("mlp.proj.bias", ("mlp.down_proj.bias",), ("hidden",), when="mlp_bias"),
    _norm("post_feedforward_layernorm", "post_feedforward_layernorm", when="post_norms"),
)
# In the place of the rows of the same keys, where projections that read the same rows are one tensor of the source.
JOINED_RULES: tuple[WeightRule, ...] = (
    WeightRule("attention.qkv.weight", ("self_attn.qkv_proj.weight",), ("qkv",), "hidden"),
    WeightRule("mlp.fc.weight", ("mlp.gate_up_proj.weight",), ("ffn",), "hidden", part=(0, 2)),
    WeightRule("mlp.gate.weight", ("mlp.gate_up_proj.weight",), ("ffn",), "hidden", part=(1, 2)),
)


class ExpertNames(NamedTuple):
    """What an architecture calls the router, and of each expert, by number, what ``mlp`` has of a dense layer."""

    router: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = {
    "MixtralForCausalLM": ExpertNames(
        "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))
    ),
    "Qwen3MoeForCausalLM": ExpertNames(
        "mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
    ),
}
# Of gpt-oss: one tensor of the source is a matrix of all experts, and the outputs of gate and up take turns.
STACKED_EXPERT_RULES: tuple[WeightRule, ...] = (
    WeightRule("mlp.router.weight", ("mlp.router.weight",), ("experts",), "hidden"),
    WeightRule("mlp.router.bias", ("mlp.router.bias",), ("experts",)),
    WeightRule("mlp.fc.weight", ("mlp.experts.gate_up_proj",), ("expert_ffn",), "hidden", num_in_turn=2),
    WeightRule("mlp.fc.bias", ("mlp.experts.gate_up_proj_bias",), ("expert_ffn",), num_in_turn=2),
    WeightRule("mlp.proj.weight", ("mlp.experts.down_proj",), ("hidden",), "expert_ffn", num_in_turn=1),
    WeightRule("mlp.proj.bias", ("mlp.experts.down_proj_bias",), ("hidden",), num_in_turn=1),
)
FINAL_NORM = _norm("transformer.ln_f", "model.norm")
LM_HEAD = WeightRule("lm_head.weight", ("lm_head.weight",), ("vocab",), "hidden", when="not share_embedding_table")

LAYER_KEY_PREFIX = "transformer.layers.{layer}."
LAYER_SOURCE_PREFIX = "model.layers.{layer}."


def expert_rules(config: CheckpointConfig) -> tuple[WeightRule, ...]:
    """Return the rows of a layer's experts: ``mlp.fc [experts, 2 * ffn, hidden]`` holds up_proj above gate_proj."""
    if config.experts is None:
        return ()
    count = config.experts.num_experts
    if config.architecture not in EXPERT_NAMES:
        return tuple(replace(rule, num_matrices=count if rule.num_in_turn else None) for rule in STACKED_EXPERT_RULES)
    names = EXPERT_NAMES[config.architecture]
    fc = tuple(f"{name.format(expert)}.weight" for expert in range(count) for name in (names.up, names.gate))
    proj = tuple(f"{names.down.format(expert)}.weight" for expert in range(count))
    return (
        WeightRule("mlp.router.weight", (f"{names.router}.weight",), ("experts",), "hidden"),
        WeightRule("mlp.fc.weight", fc, ("expert_ffn",) * len(fc), "hidden", num_matrices=count),
        WeightRule("mlp.proj.weight", proj, ("hidden",) * count, "expert_ffn", num_matrices=count),
    )

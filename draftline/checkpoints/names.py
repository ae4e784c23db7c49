"""Weight maps as data tables: the table is the converter.

Source: ``convert_hf_llama`` and the Qwen loader of TensorRT-LLM. Traps: ``mlp.fc`` is Hugging Face's ``gate_proj`` and
``mlp.gate`` its ``up_proj``, but of experts ``mlp.fc`` is ``up_proj`` above ``gate_proj``; ``attention.qkv`` is q, k, v
joined along rows; ``post_layernorm`` is the norm before the MLP, but behind attention where there are norms behind both
(Gemma 2 and 3). Linear weights are [out, in] on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError


@dataclass(frozen=True)
class WeightRule:
    """One row of the table: ``sources`` joined along rows become ``key``.

    ``rows`` gives the symbolic row count of each source, ``columns`` is None for vectors. ``when`` names the field of
    ``CheckpointConfig`` that must be true, with ``not `` for one that must be false. ``part`` (i, n): ``key`` is the
    part i of n equal ones of its source's rows. ``is_norm``: of an RMS norm. ``num_matrices``: ``key`` is so many
    matrices, ``[matrices, rows, columns]``, and each has as many of the rows.
    """

    key: str
    sources: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None = None
    when: str | None = None
    part: tuple[int, int] = (0, 1)
    is_norm: bool = False
    num_matrices: int | None = None


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
FINAL_NORM = _norm("transformer.ln_f", "model.norm")
LM_HEAD = WeightRule("lm_head.weight", ("lm_head.weight",), ("vocab",), "hidden", when="not share_embedding_table")

LAYER_KEY_PREFIX = "transformer.layers.{layer}."
LAYER_SOURCE_PREFIX = "model.layers.{layer}."

# Tensors of old checkpoints that hold no weights.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
# Heads that live among the tensors of their model: a draft of the same folder reads them.
MEDUSA_HEADS = re.compile(r"medusa_heads?\..*")


@dataclass(frozen=True)
class TargetTensor:
    """A tensor of the converted checkpoint and the source tensors, with their shapes, that are joined into it.

    ``part`` (i, n): it is the part i of n equal ones of its source's rows. ``addend`` is added in float32 to every
    element, rounded as the others are, and the tensor stays so: a sum of 16 bits would not have all of the weight's.
    """

    key: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    part: tuple[int, int] = (0, 1)
    addend: float = 0.0

    def dtype(self, dtype: str) -> str:
        """Return the dtype that the tensor has in a checkpoint of ``dtype``."""
        return "float32" if self.addend else dtype


def weight_map(config: CheckpointConfig) -> list[TargetTensor]:
    """Return the tensors of a converted checkpoint, in file order."""
    family = FAMILIES[config.architecture]
    joined = {rule.key: rule for rule in JOINED_RULES if family.joined_sources}
    rules = [EMBEDDING]
    for layer in range(config.num_hidden_layers):
        key_prefix, source_prefix = LAYER_KEY_PREFIX.format(layer=layer), LAYER_SOURCE_PREFIX.format(layer=layer)
        for row in (*LAYER_RULES, *expert_rules(config)):
            rule = joined.get(row.key, row)
            sources = tuple(source_prefix + source for source in rule.sources)
            rules.append(replace(rule, key=key_prefix + rule.key, sources=sources))
    rules += [FINAL_NORM, LM_HEAD]
    q_size, kv_size = (heads * config.head_size for heads in (config.num_attention_heads, config.num_key_value_heads))
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "q": q_size,
        "kv": kv_size,
        "qkv": q_size + 2 * kv_size,
        "head": config.head_size,
    }
    if config.experts is not None:
        sizes |= {"experts": config.experts.num_experts, "expert_ffn": config.experts.intermediate_size}
    norm_addend = 1.0 if family.norms_add_one else 0.0
    return [_apply(rule, sizes, norm_addend) for rule in rules if _holds(rule.when, config)]


def expert_rules(config: CheckpointConfig) -> tuple[WeightRule, ...]:
    """Return the rows of a layer's experts: ``mlp.fc [experts, 2 * ffn, hidden]`` holds up_proj above gate_proj."""
    if config.experts is None:
        return ()
    names, count = EXPERT_NAMES[config.architecture], config.experts.num_experts
    fc = tuple(f"{name.format(expert)}.weight" for expert in range(count) for name in (names.up, names.gate))
    proj = tuple(f"{names.down.format(expert)}.weight" for expert in range(count))
    return (
        WeightRule("mlp.router.weight", (f"{names.router}.weight",), ("experts",), "hidden"),
        WeightRule("mlp.fc.weight", fc, ("expert_ffn",) * len(fc), "hidden", num_matrices=count),
        WeightRule("mlp.proj.weight", proj, ("hidden",) * count, "expert_ffn", num_matrices=count),
    )


def check_tensors(config: CheckpointConfig, tensors: Mapping[str, SourceTensor], where: object) -> list[TargetTensor]:
    """Return ``weight_map(config)`` after checking that the source has exactly its tensors, of the right shapes.

    ``lm_head.weight`` may be present although the configuration ties it to the embedding; the caller compares them.

    Raises:
        CheckpointError: tensors are missing, unexpected (the message lists all of them) or of another shape.
    """
    targets = weight_map(config)
    allowed = {LM_HEAD.key} if config.share_embedding_table else set()
    check_source_tensors(
        targets,
        tensors,
        where,
        kind=config.architecture,
        is_ignored=lambda name: name in allowed or any(kind.fullmatch(name) for kind in (IGNORED, MEDUSA_HEADS)),
        cure="check architectures and the bias flags in config.json; adapters must be merged first",
    )
    return targets


def check_source_tensors(
    targets: Sequence[TargetTensor],
    tensors: Mapping[str, SourceTensor],
    where: object,
    *,
    kind: str,
    is_ignored: Callable[[str], bool],
    cure: str,
) -> None:
    """Check that a source has exactly the tensors that ``targets`` are made of, of the right shapes.

    ``kind`` names the checkpoint's kind and ``cure`` what to do about unexpected tensors in the error messages.

    Raises:
        CheckpointError: tensors are missing, unexpected (the message lists all of them) or of another shape.
    """
    wanted = dict(source for target in targets for source in target.sources)
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted and not is_ignored(name)]
    if missing:
        rule = f"the checkpoint has {len(wanted)} tensors"
        got = f"without {', '.join(missing)}" + (f", but with {', '.join(unexpected)}" if unexpected else "")
        raise CheckpointError(where, rule, got, "fetch the whole checkpoint, or correct its config.json")
    if unexpected:
        rule = f"the checkpoint has the tensors of {kind} and no others"
        raise CheckpointError(where, rule, f"also {', '.join(unexpected)}", cure)
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            correct = "correct config.json, or fetch the checkpoint again"
            raise CheckpointError(tensor.where, f"tensor {name} has shape {list(shape)}", list(tensor.shape), correct)


def _apply(rule: WeightRule, sizes: Mapping[str, int], norm_addend: float) -> TargetTensor:
    columns = () if rule.columns is None else (sizes[rule.columns],)
    _, num_parts = rule.part
    shapes = [(num_parts * sizes[rows], *columns) for rows in rule.rows]
    total_rows = sum(shape[0] for shape in shapes) // num_parts
    sources = tuple(zip(rule.sources, shapes, strict=True))
    count = rule.num_matrices
    shape = (total_rows, *columns) if count is None else (count, total_rows // count, *columns)
    return TargetTensor(rule.key, shape, sources, rule.part, norm_addend if rule.is_norm else 0.0)


def _holds(when: str | None, config: CheckpointConfig) -> bool:
    if when is None:
        return True
    field = when.removeprefix("not ")
    return bool(getattr(config, field)) == (field == when)

"""Weight maps as data tables: the table is the converter.

Source: ``convert_hf_llama`` and the Qwen loader of TensorRT-LLM. Traps: ``mlp.fc`` is Hugging Face's ``gate_proj`` and
``mlp.gate`` its ``up_proj``; ``attention.qkv`` is q, k, v joined along rows. Linear weights are [out, in] on both
sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError


@dataclass(frozen=True)
class WeightRule:
    """One row of the table: ``sources`` joined along rows become ``key``.

    ``rows`` gives the symbolic row count of each source, ``columns`` is None for vectors. ``when`` names the field of
    ``CheckpointConfig`` that must be true, with ``not `` for one that must be false.
    """

    key: str
    sources: tuple[str, ...]
    rows: tuple[str, ...]
    columns: str | None = None
    when: str | None = None


_QKV = ("q", "kv", "kv")
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

EMBEDDING = WeightRule("transformer.vocab_embedding.weight", ("model.embed_tokens.weight",), ("vocab",), "hidden")
LAYER_RULES: tuple[WeightRule, ...] = (
    WeightRule("input_layernorm.weight", ("input_layernorm.weight",), ("hidden",)),
    WeightRule("attention.qkv.weight", tuple(f"{name}.weight" for name in _PROJECTIONS), _QKV, "hidden"),
    WeightRule("attention.qkv.bias", tuple(f"{name}.bias" for name in _PROJECTIONS), _QKV, when="qkv_bias"),
    WeightRule("attention.q_layernorm.weight", ("self_attn.q_norm.weight",), ("head",), when="qk_norm"),
    WeightRule("attention.k_layernorm.weight", ("self_attn.k_norm.weight",), ("head",), when="qk_norm"),
    WeightRule("attention.dense.weight", ("self_attn.o_proj.weight",), ("hidden",), "q"),
    WeightRule("attention.dense.bias", ("self_attn.o_proj.bias",), ("hidden",), when="dense_bias"),
    WeightRule("post_layernorm.weight", ("post_attention_layernorm.weight",), ("hidden",)),
    # fc and gate are neighbours in the file, so one initializer of a graph may span both.
    WeightRule("mlp.fc.weight", ("mlp.gate_proj.weight",), ("ffn",), "hidden"),
    WeightRule("mlp.gate.weight", ("mlp.up_proj.weight",), ("ffn",), "hidden"),
    WeightRule("mlp.fc.bias", ("mlp.gate_proj.bias",), ("ffn",), when="mlp_bias"),
    WeightRule("mlp.gate.bias", ("mlp.up_proj.bias",), ("ffn",), when="mlp_bias"),
    WeightRule("mlp.proj.weight", ("mlp.down_proj.weight",), ("hidden",), "ffn"),
    WeightRule("mlp.proj.bias", ("mlp.down_proj.bias",), ("hidden",), when="mlp_bias"),
)
FINAL_NORM = WeightRule("transformer.ln_f.weight", ("model.norm.weight",), ("hidden",))
LM_HEAD = WeightRule("lm_head.weight", ("lm_head.weight",), ("vocab",), "hidden", when="not share_embedding_table")

LAYER_KEY_PREFIX = "transformer.layers.{layer}."
LAYER_SOURCE_PREFIX = "model.layers.{layer}."

# Tensors of old checkpoints that hold no weights.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
# Heads that live among the tensors of their model: a draft of the same folder reads them.
MEDUSA_HEADS = re.compile(r"medusa_heads?\..*")


@dataclass(frozen=True)
class TargetTensor:
    """A tensor of the converted checkpoint and the source tensors, with their shapes, that are joined into it."""

    key: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]


def weight_map(config: CheckpointConfig) -> list[TargetTensor]:
    """Return the tensors of a converted checkpoint, in file order."""
    rules = [EMBEDDING]
    for layer in range(config.num_hidden_layers):
        key_prefix, source_prefix = LAYER_KEY_PREFIX.format(layer=layer), LAYER_SOURCE_PREFIX.format(layer=layer)
        for rule in LAYER_RULES:
            sources = tuple(source_prefix + source for source in rule.sources)
            rules.append(WeightRule(key_prefix + rule.key, sources, rule.rows, rule.columns, rule.when))
    rules += [FINAL_NORM, LM_HEAD]
    sizes = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "q": config.num_attention_heads * config.head_size,
        "kv": config.num_key_value_heads * config.head_size,
        "head": config.head_size,
    }
    return [_apply(rule, sizes) for rule in rules if _holds(rule.when, config)]


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


def _apply(rule: WeightRule, sizes: Mapping[str, int]) -> TargetTensor:
    columns = () if rule.columns is None else (sizes[rule.columns],)
    shapes = [(sizes[rows], *columns) for rows in rule.rows]
    total_rows = sum(shape[0] for shape in shapes)
    return TargetTensor(rule.key, (total_rows, *columns), tuple(zip(rule.sources, shapes, strict=True)))


def _holds(when: str | None, config: CheckpointConfig) -> bool:
    if when is None:
        return True
    field = when.removeprefix("not ")
    return bool(getattr(config, field)) == (field == when)

"""The tensors of a converted checkpoint, by the table of ``weight_rules``: the table is the converter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.checkpoints.weight_rules import (
    EMBEDDING,
    FINAL_NORM,
    JOINED_RULES,
    LAYER_KEY_PREFIX,
    LAYER_RULES,
    LAYER_SOURCE_PREFIX,
    LM_HEAD,
    WeightRule,
    expert_rules,
)
from draftline.errors import CheckpointError

# Tensors of old checkpoints that hold no weights.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")
# Heads that live among the tensors of their model: a draft of the same folder reads them.
MEDUSA_HEADS = re.compile(r"medusa_heads?\..*")


@dataclass(frozen=True)
class TargetTensor:
    """A tensor of the converted checkpoint and the source tensors, with their shapes, that are joined into it.

    ``part`` (i, n): it is the part i of n equal ones of its source's rows. ``addend`` is added in float32 to every
    element, rounded as the others are, and the tensor stays so: a sum of 16 bits would not have all of the weight's.
    ``num_in_turn``: as in ``WeightRule``.
    """

    key: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    part: tuple[int, int] = (0, 1)
    addend: float = 0.0
    num_in_turn: int = 0

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
        "heads": config.num_attention_heads,
    }
    if config.experts is not None:
        sizes |= {"experts": config.experts.num_experts, "expert_ffn": config.experts.intermediate_size}
    norm_addend = 1.0 if family.norms_add_one else 0.0
    return [_apply(rule, sizes, norm_addend) for rule in rules if _holds(rule.when, config)]


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
    if rule.num_in_turn:
        assert rule.num_matrices is not None, "the matrices of all experts"
        rows = rule.num_in_turn * sizes[rule.rows[0]]
        source = (rule.sources[0], (rule.num_matrices, *columns, rows))
        return TargetTensor(rule.key, (rule.num_matrices, rows, *columns), (source,), num_in_turn=rule.num_in_turn)
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

"""A draft in words, beside its target: what it is, what it borrows, and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.known_positions import known_positions

_FEATURE_NORMS = {"joined": "a norm of the joined features", "each": "a norm of each captured layer's features"}


def describe_head(head: HeadConfig, target: CheckpointConfig | None) -> Iterator[str]:
    """Yield what a head is, what it reads and borrows, and what its reader noted; one fact a line.

    ``target`` None: it is not known, and nothing is compared.
    """
    if head.method == "medusa":
        yield f"{head.layout}: {head.num_heads} heads, residual blocks of each: {head.num_layers}"
        if not head.owns_medusa_lm_heads:
            yield f"borrows the target's {_lm_head(head, target)} for every head"
        return
    vocabulary = f"{head.draft_vocab_size} of the target's {head.vocab_size} tokens"
    yield (
        f"{head.layout}: {head.num_layers} layer{'s' * (head.num_layers > 1)}, hidden_size {head.hidden_size}, "
        f"{head.num_attention_heads} query and {head.num_key_value_heads} key/value heads of {head.head_size}, "
        f"{vocabulary if head.draft_vocab_size < head.vocab_size else 'the whole vocabulary'}"
    )
    if head.captured_layers:
        of_all = f" of {target.num_hidden_layers}" if target else ""
        yield f"reads the outputs of layers {list(head.captured_layers)}{of_all}"
    if variant := list(_variant(head)):
        yield f"with {', '.join(variant)}"
    lent = [f"embedding {[head.vocab_size, head.hidden_size]}"] * (not head.owns_embedding)
    lent += [_lm_head(head, target)] * (not head.owns_lm_head)
    yield f"borrows the target's {' and '.join(lent)}" if lent else "borrows nothing"
    if target is None:
        known = known_positions(head.max_position_embeddings, head.rotary_scaling)
        yield f"rotary: {describe_rotary(head.rotary_base, head.rotary_scaling)}; knows {known} positions"
    else:
        yield from compare_rotary(head.rotary_base, head.rotary_scaling, target)
        yield from compare_positions(head.max_position_embeddings, head.rotary_scaling, target)
    yield from head.notes


def describe_draft_model(draft: CheckpointConfig, target: CheckpointConfig) -> Iterator[str]:
    """Yield what a converted draft model is, and where its vocabulary and length are not the target's."""
    yield (
        f"{draft.architecture}: {draft.num_hidden_layers} layers, hidden_size {draft.hidden_size}, "
        f"{draft.vocab_size} rows of vocabulary; borrows nothing"
    )
    if draft.vocab_size != target.vocab_size:
        yield f"{draft.vocab_size} rows of vocabulary where the target has {target.vocab_size}"
    yield from compare_positions(draft.max_position_embeddings, draft.rotary_scaling, target)


def compare_rotary(base: float, scaling: dict[str, Any] | None, target: CheckpointConfig) -> Iterator[str]:
    """Yield the head's rotary settings where they are not the target's."""
    if (base, scaling) != (target.rotary_base, target.rotary_scaling):
        ours, theirs = describe_rotary(base, scaling), describe_rotary(target.rotary_base, target.rotary_scaling)
        yield f"rotary: {ours}, where the target has {theirs}"


def compare_positions(num_positions: int, scaling: dict[str, Any] | None, target: CheckpointConfig) -> Iterator[str]:
    """Yield where a draft ends, if that is before the target does."""
    ours = known_positions(num_positions, scaling)
    theirs = known_positions(target.max_position_embeddings, target.rotary_scaling)
    if 0 < ours < theirs:
        yield f"knows {ours} positions where the target knows {theirs}: behind them it is not asked"


def _variant(head: HeadConfig) -> Iterator[str]:
    if head.feature_norm != "none":
        yield _FEATURE_NORMS[head.feature_norm]
    if head.norm_before_residual:
        yield "the norm before the residual"
    if head.feeds_normed:
        yield "normed outputs fed back"
    if head.qk_norm:
        yield "norms of queries and keys"
    biases = {"fc": head.fc_bias, "q, k, v": head.qkv_bias, "o": head.dense_bias, "mlp": head.mlp_bias}
    if any(biases.values()):
        yield f"biases of {', '.join(name for name, is_there in biases.items() if is_there)}"


def _rest(scaling: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in scaling.items() if key != "rope_type"]


def describe_rotary(base: float, scaling: dict[str, Any] | None) -> str:
    """Return the base and, where there is one, the scaling.

    >>> describe_rotary(1e6, {"rope_type": "linear", "factor": 2.0})
    'base 1e+06 and linear (factor 2)'
    """
    if scaling is None:
        return f"base {base:g}"
    texts = {key: f"{len(value)} numbers" if isinstance(value, list) else f"{value:g}" for key, value in _rest(scaling)}
    rest = ", ".join(f"{key} {text}" for key, text in texts.items())
    return f"base {base:g} and {scaling['rope_type']} ({rest})"


def _lm_head(head: HeadConfig, target: CheckpointConfig | None) -> str:
    tie = " (its embedding, to which it is tied)" if target and target.share_embedding_table else ""
    return f"lm_head {[head.vocab_size, head.target_hidden_size]}{tie}"

"""Read EAGLE heads in every layout of ``eagle_layouts``.

Source: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858; EAGLE-1's checkpoint) and EAGLE-3 (arXiv 2503.01840) as
their repository, SpecForge, ModelOpt and speculators store them. The reference loads with ``strict=False``, so a head
of another kind drafts nonsense there in silence; here every tensor is accounted for.

Conventions: ``d2t`` holds offsets (target id = draft id + d2t[draft id]); ``rope_theta`` absent means 10000 whatever
the target's is; EAGLE-1's ``bias``, of ``fc``, is true if absent. What tensors can tell, they decide: biases, norms of
queries and keys, whether there is an embedding or an lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from draftline.checkpoints.draft_config import FeatureNorm, HeadConfig
from draftline.checkpoints.drafts.captured_layers import CapturedLayers, parse_captured_layers
from draftline.checkpoints.drafts.draft_vocabulary import read_vocabulary_offsets
from draftline.checkpoints.drafts.eagle_config import (
    CHOOSE,
    check_borrowed,
    check_eagle1,
    check_layernorms,
    parse_layers,
)
from draftline.checkpoints.drafts.eagle_layouts import EagleLayout, recognise_layout
from draftline.checkpoints.drafts.eagle_tensors import eagle_tensors
from draftline.checkpoints.drafts.padding import without_padding
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.huggingface import open_weights
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.names import check_source_tensors
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.checkpoints.target_sizes import TargetSizes
from draftline.errors import CheckpointError

_IGNORED = re.compile(r"(midlayer|transformer|(midlayer|layers)\.\d+)\.self_attn\.rotary_emb\.inv_freq")


def read_eagle1(directory: Path, target: TargetSizes, dtype: str) -> SourceHead:
    """Read the headers of an EAGLE-1/2 head and check them against the target.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, or ``config.json`` contradicts them or the
            target.
    """
    head = read_eagle(directory, target, dtype)
    if head.config.method != "eagle1":
        raise CheckpointError(directory, "draft.method is the head's own", "an EAGLE-3 head", "set it to eagle3")
    return head


def read_eagle3(
    directory: Path, target: TargetSizes, dtype: str, captured_layers: Sequence[int] | None = None
) -> SourceHead:
    """Read the headers and the vocabulary of an EAGLE-3 head and check them against the target.

    ``captured_layers``: in the place of those that ``config.json`` names.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, ``config.json`` contradicts them or the
            target, or the vocabulary is not a subset of the target's.
    """
    head = read_eagle(directory, target, dtype, captured_layers)
    if head.config.method != "eagle3":
        cure = "set it to eagle1 or eagle2"
        raise CheckpointError(directory, "draft.method is the head's own", "an EAGLE-1/2 head", cure)
    return head


def read_eagle(
    directory: Path, target: TargetSizes, dtype: str, captured_layers: Sequence[int] | None = None
) -> SourceHead:
    """Read an EAGLE head of whatever layout; errors as above."""
    raw, tensors = load_json(directory / "config.json"), open_weights(directory)
    layout = recognise_layout(raw, tensors, directory)
    llama = parse_layers(raw, layout, target, dtype)
    is_eagle3 = layout.method == "eagle3"
    captured, draft_vocab_size = CapturedLayers((), (), ""), target.vocab_size
    if is_eagle3:
        draft_vocab_size = _draft_vocab_size(raw, llama.vocab_size, target)
        fc = tensors.get(f"{layout.fc}.weight")
        fc_columns = fc.shape[1] if fc is not None and len(fc.shape) == 2 else None
        captured = parse_captured_layers(raw, target, fc_columns, layout.ids_name, captured_layers)
    config = HeadConfig(
        method=layout.method,
        layout=layout.name,
        dtype=llama.dtype,
        vocab_size=target.vocab_size,
        hidden_size=llama.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=llama.num_hidden_layers,
        draft_vocab_size=draft_vocab_size,
        captured_layers=captured.layers,
        captured_layer_readings=captured.readings,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_size=llama.head_size,
        intermediate_size=llama.intermediate_size,
        norm_epsilon=llama.norm_epsilon,
        rotary_base=llama.rotary_base,
        rotary_scaling=llama.rotary_scaling,
        max_position_embeddings=llama.max_position_embeddings,
        fc_bias=f"{layout.fc}.bias" in tensors,
        qkv_bias=_has(tensors, r"\.self_attn\.[qkv]_proj\.bias$"),
        dense_bias=_has(tensors, r"\.self_attn\.o_proj\.bias$"),
        mlp_bias=_has(tensors, r"\.mlp\.(gate|up|down)_proj\.bias$"),
        qk_norm=_has(tensors, r"\.self_attn\.[qk]_norm\.weight$"),
        owns_embedding="embed_tokens.weight" in tensors,
        owns_lm_head="lm_head.weight" in tensors,
        notes=(captured.note,) if captured.note else (),
    )
    if is_eagle3:
        config = _with_variant(config, raw, layout)
    check_layernorms(raw, layout)
    is_whole = draft_vocab_size == target.vocab_size
    stored = replace(config, vocab_size=llama.vocab_size)
    stored = replace(stored, draft_vocab_size=llama.vocab_size) if is_whole else stored
    vocabulary = {"d2t", "t2d"} if is_eagle3 else set()
    check_source_tensors(
        eagle_tensors(stored, layout),
        tensors,
        directory,
        kind=layout.name,
        is_ignored=lambda name: name in vocabulary or _IGNORED.fullmatch(name) is not None,
        cure="correct the switches in config.json, or use a head whose layout is in the import matrix",
    )
    if not is_eagle3:
        check_eagle1(config, raw, layout)
    if llama.vocab_size > target.vocab_size:
        cut = {"embed_tokens.weight", "t2d"} | ({"lm_head.weight", "d2t"} if is_whole else set())
        tensors = without_padding(tensors, cut, llama.vocab_size, target.vocab_size)
        note = f"{llama.vocab_size - target.vocab_size} rows of padding behind the target's {target.vocab_size} tokens"
        config = replace(config, notes=(*config.notes, note))
    wanted = eagle_tensors(config, layout)
    config = check_borrowed(config, raw)
    offsets = read_vocabulary_offsets(tensors, config, directory) if is_eagle3 else None
    return SourceHead(config, wanted, tensors, offsets)


def _draft_vocab_size(raw: JsonObject, num_rows: int, target: TargetSizes) -> int:
    size = raw.integer("draft_vocab_size", target.vocab_size)
    if size == num_rows:  # the whole vocabulary, and its padding
        return target.vocab_size
    if size > target.vocab_size:
        raise raw.error("draft_vocab_size", f"at most the target's vocab_size ({target.vocab_size})", size, CHOOSE)
    return size


def _with_variant(config: HeadConfig, raw: JsonObject, layout: EagleLayout) -> HeadConfig:
    """Add what switches say; the tensors of switches that are off are unexpected, those of others are missed."""
    joined, each = raw.flag("norm_before_fc", False), raw.flag("fc_norm", False)
    if joined and each:
        raise raw.error("norm_before_fc", "false where fc_norm is true", True)
    feature_norm: FeatureNorm = "joined" if joined else "each" if each else "none"
    norm_output = raw.flag("norm_output", not layout.norm_output_feeds)
    notes = config.notes
    if not layout.norm_output_feeds:
        if not norm_output:
            cure = "use a head whose norm stands before its lm_head"
            raise raw.error("norm_output", "true or absent in this layout", norm_output, cure)
        if raw.get("norm_output") is not None:
            notes += (
                "norm_output true means the norm before lm_head in this layout: the next depth reads what it norms",
            )
    return replace(
        config,
        feature_norm=feature_norm,
        norm_before_residual=raw.flag("norm_before_residual", False),
        feeds_normed=layout.norm_output_feeds and norm_output,
        notes=notes,
    )


def _has(tensors: Mapping[str, SourceTensor], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in tensors)

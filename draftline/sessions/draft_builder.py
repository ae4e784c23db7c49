"""What an engine's drafters are made of: configs, weights and graphs, described before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import load_head_config
from draftline.checkpoints.known_positions import known_positions
from draftline.checkpoints.safetensors_file import TensorEntry
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import BuildError
from draftline.graphs import eagle
from draftline.graphs.decoder import Pool
from draftline.graphs.draft_model import build_draft_model_graph
from draftline.graphs.onnx_graph import TensorLocation
from draftline.graphs.operators import Operators
from draftline.graphs.target import EMBEDDING, LM_HEAD, DraftTaps, lm_head_name
from draftline.sessions.batch_split import count_parameters
from draftline.sessions.engine_config import DraftConfig, DraftMethod
from draftline.sessions.engine_weights import CHECKPOINT_FILE, EngineWeights, read_engine_weights
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.rotary_weights import rotary_entries
from draftline.speculation import TreeShape
from draftline.tree_growth import needed_candidates


class _Form(NamedTuple):
    """Arguments of ``read_engine_weights``."""

    weights_dtype: str
    kernels: Kernels
    rounded_as: str | None


HEAD_METHODS = {"eagle1": "eagle1", "eagle2": "eagle1", "eagle3": "eagle3", "medusa": "medusa"}


@dataclass(frozen=True)
class DraftSource:
    """A drafter to build: ``checkpoint`` is the folder of the converted checkpoint, None for ``ngram``.

    ``weights_dtype``: of its own matrices, None = as the target's. ``captured_layers``: in the place of those that the
    checkpoint names, () = those.
    """

    method: DraftMethod
    checkpoint: Path | None = None
    weights_dtype: str | None = None
    captured_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DraftParts:
    """A drafter to be written. ``head`` is there of heads, ``model`` of a draft model, ``weights`` of both."""

    config: DraftConfig
    weights: EngineWeights | None = None
    head: HeadConfig | None = None
    model: CheckpointConfig | None = None

    def build_graph(
        self,
        own: Mapping[str, TensorLocation],
        target: Mapping[str, TensorLocation],
        target_config: CheckpointConfig,
        pool: Pool,
        operators: Operators,
    ) -> onnx.ModelProto | None:
        """Build the drafter's graph over its ``own`` tensors and those it borrows of the ``target``; None without."""
        k = self.config.num_candidates
        if self.model is not None:
            return build_draft_model_graph(self.model, own, pool, k, target_config.vocab_size, operators)
        if self.head is None or self.head.method == "medusa":
            return None
        borrowed: dict[str, TensorLocation] = {}
        # As stored: what scales the target's rows (Gemma) or caps its logits is no part of published heads.
        if not self.head.owns_embedding:
            borrowed |= _renamed(target, EMBEDDING, eagle.EMBEDDING)
        if not self.head.owns_lm_head:
            borrowed |= _renamed(target, lm_head_name(target_config), eagle.LM_HEAD)
        return eagle.build_eagle_graph(self.head, {**borrowed, **own}, pool, k, operators)


def describe_drafts(
    target: CheckpointConfig,
    drafts: Sequence[DraftSource],
    tree: TreeShape | None,
    weights_dtype: str,
    kernels: Kernels,
    max_seq_len: int,
    rounded_as: str | None = None,
) -> list[DraftParts]:
    """Read the configs of converted drafts and check that they fit; ``rounded_as`` as of ``read_engine_weights``.

    Raises: BuildError for drafts that do not fit the target, the tree or each other; CheckpointError for damaged ones.
    """
    if tree is None:
        if drafts:
            raise BuildError("tree", "says how the drafts are used", "none", "give the shape of the tree")
        return []
    if not drafts:
        raise BuildError("tree", "stands beside a draft", tree.kind, "name a draft or leave the tree out")
    methods = [draft.method for draft in drafts]
    if len(set(methods)) < len(methods):
        raise BuildError("drafts", "names a method once", ", ".join(methods), "leave one of the equal ones out")
    described = [
        _describe(index, draft, target, tree, _Form(weights_dtype, kernels, rounded_as), max_seq_len)
        for index, draft in enumerate(drafts)
    ]
    return _place_features(described, target)


def target_taps(described: Sequence[DraftParts]) -> DraftTaps:
    """Say what these drafters take from the target's forward."""
    heads = [draft.head for draft in described if draft.head is not None]
    medusa = next((draft for draft in described if draft.config.method == "medusa"), None)
    return DraftTaps(
        captured_layers=tuple(layer for head in heads for layer in head.captured_layers),
        final_hidden=any(head.method == "eagle1" for head in heads),
        medusa=None if medusa is None else medusa.head,
        num_candidates=0 if medusa is None else medusa.config.num_candidates,
    )


def _describe(
    index: int,
    source: DraftSource,
    target: CheckpointConfig,
    tree: TreeShape,
    form: _Form,
    max_seq_len: int,
) -> DraftParts:
    where = f"drafts[{index}]"
    if (source.checkpoint is None) != (source.method == "ngram"):
        rule = "ngram has no checkpoint, every other method has one"
        raise BuildError(where, rule, f"{source.method} with {source.checkpoint}", "give a converted checkpoint")
    if source.checkpoint is None:
        return DraftParts(DraftConfig(source.method))
    form = form._replace(weights_dtype=source.weights_dtype or form.weights_dtype)
    if source.method == "draft_model":
        return _describe_model(index, source.checkpoint, target, tree, form, max_seq_len)
    return _describe_head(index, source, source.checkpoint, target, tree, form, max_seq_len)


def _rotary_entries(layers: CheckpointConfig, tree: TreeShape, max_seq_len: int) -> tuple[TensorEntry, ...]:
    """A tree's deepest nodes stand behind the last position of a text."""
    return rotary_entries(layers, max_seq_len, max_seq_len + tree.max_depth)


def _describe_model(
    index: int,
    checkpoint: Path,
    target: CheckpointConfig,
    tree: TreeShape,
    form: _Form,
    max_seq_len: int,
) -> DraftParts:
    model = load_checkpoint_config(checkpoint)
    config = DraftConfig(
        method="draft_model",
        num_candidates=_num_candidates(index, tree, min(model.vocab_size, target.vocab_size)),
        max_position_embeddings=known_positions(model.max_position_embeddings, model.rotary_scaling),
        num_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_size=model.head_size,
        num_parameters=count_parameters(model),
        weights_dtype=form.weights_dtype,
    )
    first = _rotary_entries(model, tree, max_seq_len)
    weights = _read_weights(index, checkpoint, model.dtype, form, (EMBEDDING, LM_HEAD), first)
    return DraftParts(config, weights, model=model)


def _describe_head(
    index: int,
    source: DraftSource,
    checkpoint: Path,
    target: CheckpointConfig,
    tree: TreeShape,
    form: _Form,
    max_seq_len: int,
) -> DraftParts:
    head = load_head_config(checkpoint)
    if source.captured_layers:
        head = replace(head, captured_layers=source.captured_layers)
    _check_head(f"drafts[{index}]", source.method, head, target)
    if head.method == "medusa":
        config = DraftConfig(
            method=source.method,
            num_candidates=_num_candidates(index, tree, head.vocab_size),
            num_heads=head.num_heads,
            weights_dtype=form.weights_dtype,
        )
        first: tuple[TensorEntry, ...] = ()
        outer: tuple[str, ...] = tuple(f"medusa_heads.{number}.lm_head" for number in range(head.num_heads))
    else:
        config = DraftConfig(
            method=source.method,
            num_candidates=_num_candidates(index, tree, head.draft_vocab_size),
            max_position_embeddings=known_positions(head.max_position_embeddings, head.rotary_scaling),
            num_layers=head.num_layers,
            num_attention_heads=head.num_attention_heads,
            num_key_value_heads=head.num_key_value_heads,
            head_size=head.head_size,
            hidden_size=head.hidden_size,
            feature_size=eagle.feature_size(head),
            num_parameters=_count_head_parameters(head),
            weights_dtype=form.weights_dtype,
        )
        first = _rotary_entries(eagle.head_layers(head), tree, max_seq_len)
        outer = (eagle.EMBEDDING, eagle.LM_HEAD)
    weights = _read_weights(index, checkpoint, head.dtype, form, outer, first)
    return DraftParts(config, weights, head=head)


def _read_weights(
    index: int,
    checkpoint: Path,
    dtype: str,
    form: _Form,
    outer: tuple[str, ...],
    first: tuple[TensorEntry, ...],
) -> EngineWeights:
    file, linked_file = f"draft-{index}.safetensors", f"draft-{index}-{CHECKPOINT_FILE}"
    return read_engine_weights(
        checkpoint,
        dtype,
        form.weights_dtype,
        form.kernels,
        outer=outer,
        first=first,
        file=file,
        linked_file=linked_file,
        rounded_as=form.rounded_as,
    )


def _count_head_parameters(head: HeadConfig) -> int:
    """Count as ``count_parameters`` does; the first layer of EAGLE-3 reads two rows side by side, and ``fc`` joins."""
    layers = count_parameters(replace(eagle.head_layers(head), vocab_size=head.draft_vocab_size))
    if head.method == "eagle1":
        return layers + 2 * head.hidden_size**2
    second_half = (head.num_attention_heads + 2 * head.num_key_value_heads) * head.head_size * head.hidden_size
    return layers + second_half + eagle.feature_size(head) * head.hidden_size


def _check_head(where: str, method: DraftMethod, head: HeadConfig, target: CheckpointConfig) -> None:
    cure = "convert the draft for this target"
    if head.method != HEAD_METHODS[method]:
        raise BuildError(where, f"{method} is built from a head of {HEAD_METHODS[method]}", head.method, cure)
    shapes = {
        "target_hidden_size": (head.target_hidden_size, target.hidden_size),
        "vocab_size": (head.vocab_size, target.vocab_size),
    }
    if head.method != "eagle3":  # these heads put out features of the target
        shapes["hidden_size"] = (head.hidden_size, target.hidden_size)
    for name, (found, expected) in shapes.items():
        if found != expected:
            raise BuildError(f"{where}: {name}", f"is the target's, {expected}", found, cure)
    for layer in head.captured_layers:
        if not 0 <= layer < target.num_hidden_layers:
            rule = f"captures layers of the target, which has {target.num_hidden_layers}"
            raise BuildError(where, rule, layer, cure)


def _num_candidates(index: int, tree: TreeShape, vocab_size: int) -> int:
    wanted = needed_candidates(tree)
    if wanted > vocab_size:
        rule = f"a node has at most as many children as the draft has tokens, {vocab_size}"
        raise BuildError(f"drafts[{index}]", rule, wanted, "make the tree narrower")
    return wanted


def _place_features(described: Sequence[DraftParts], target: CheckpointConfig) -> list[DraftParts]:
    """Give every EAGLE head its columns: captured layers in the order of the drafts, then the final hidden rows."""
    placed, start = [], 0
    final_start = target.hidden_size * len(target_taps(described).captured_layers)
    for draft in described:
        if draft.head is not None and draft.head.captured_layers:
            draft = replace(draft, config=replace(draft.config, feature_start=start))
            start += draft.config.feature_size
        elif draft.config.feature_size:
            draft = replace(draft, config=replace(draft.config, feature_start=final_start))
        placed.append(draft)
    return placed


def _renamed(tensors: Mapping[str, TensorLocation], name: str, new_name: str) -> dict[str, TensorLocation]:
    return {key.replace(name, new_name, 1): tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name}

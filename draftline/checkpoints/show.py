"""What a published checkpoint is, before anything is converted: ``draftline show CHECKPOINT``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.convert import open_source
from draftline.checkpoints.drafts.captured_layers import default_layers, written_ids
from draftline.checkpoints.drafts.description import describe_head, describe_rotary
from draftline.checkpoints.drafts.eagle import read_eagle
from draftline.checkpoints.drafts.eagle_config import speculators_layers
from draftline.checkpoints.drafts.medusa import MEDUSA_FILES, holds_medusa_heads, medusa_sizes, read_medusa
from draftline.checkpoints.drafts.vocabulary import check_same_tokens
from draftline.checkpoints.huggingface import WEIGHTS_FILES, open_weights
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.known_positions import known_positions
from draftline.checkpoints.names import TargetTensor, check_tensors
from draftline.checkpoints.refused_architectures import REASONS, check_architecture
from draftline.checkpoints.source import PACKAGE_PREFIX, resolve_checkpoint
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.checkpoints.tokenizer import TOKENIZER_FILE
from draftline.checkpoints.trtllm import CONFIG_FILE
from draftline.errors import CheckpointError


def is_checkpoint(reference: str) -> bool:
    """Whether ``reference`` names a checkpoint, and not a pipeline file."""
    return reference.startswith(PACKAGE_PREFIX) or reference.endswith(".gguf") or Path(reference).is_dir()


def describe_checkpoint(reference: str, target: str | None, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Yield what the checkpoint is, its layout, parameters, and what it would borrow; headers alone are read.

    ``target``: the checkpoint that a draft is compared with; None leaves open what only that can tell.

    Raises: CheckpointError where the checkpoint cannot be imported, or does not fit the target.
    """
    if overrides:
        raise CheckpointError(reference, "a checkpoint has no fields to replace", " ".join(overrides), "leave them out")
    path = resolve_checkpoint(reference, Path())
    _check_known(path)
    if path.is_file() or _is_model(path):
        yield from _describe_model(path)
        if path.is_file() or not holds_medusa_heads(open_weights(path)):
            return
    target_path = None if target is None else resolve_checkpoint(target, Path())
    yield from _describe_head(path, target_path)


def _check_known(path: Path) -> None:
    """Refuse a model by its name where its tensors would not tell that it is one."""
    if (path / CONFIG_FILE).is_file():
        config = load_json(path / CONFIG_FILE)
        if not REASONS.keys().isdisjoint(map(str, config.get("architectures") or ())):
            check_architecture(config)


def _is_model(directory: Path) -> bool:
    if any(directory.glob("*.gguf")):
        return True
    has_weights = any((directory / name).exists() for name in WEIGHTS_FILES)
    return has_weights and any(name.startswith("model.layers.0.") for name in open_weights(directory))


def _describe_model(path: Path) -> Iterator[str]:
    checkpoint = open_source(path, "float32")
    config = checkpoint.config
    wanted = check_tensors(config, checkpoint.tensors, checkpoint.where)
    tied = ", lm_head tied to the embedding" if config.share_embedding_table else ""
    yield (
        f"{config.architecture}: {config.num_hidden_layers} layers, hidden_size {config.hidden_size}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads of {config.head_size}, "
        f"{config.vocab_size} tokens{tied}"
    )
    if config.experts is not None:
        count, per_token, size = config.experts.num_experts, config.experts.per_token, config.experts.intermediate_size
        yield f"experts: {count} in a layer, {size} wide, {per_token} for a token"
    yield _parameters(wanted, checkpoint.tensors)
    yield from checkpoint.notes
    known = known_positions(config.max_position_embeddings, config.rotary_scaling)
    part = "" if config.rotary_fraction == 1 else f" of the first {config.rotary_size} elements of a head"
    yield f"rotary{part}: {describe_rotary(config.rotary_base, config.rotary_scaling)}; knows {known} positions"
    yield from _describe_windows(config)
    gate_limit = None if config.experts is None else config.experts.gate_limit
    differences = {
        f"a gate by {config.hidden_act}": config.hidden_act != "silu",
        "norms behind attention and MLP": config.post_norms,
        f"the embedding times {config.embedding_scale:g}": config.embedding_scale != 1,
        f"scores over the root of {config.query_pre_attn_scalar or 0:g}": config.query_pre_attn_scalar is not None,
        f"scores capped at {config.attention_softcap or 0:g}": config.attention_softcap is not None,
        f"gates clamped at {gate_limit or 0:g}": gate_limit is not None,
        "sinks in attention": config.attention_sinks,
        f"logits capped at {config.logit_softcap or 0:g}": config.logit_softcap is not None,
    }
    if any(differences.values()):
        yield f"beside Llama's network: {', '.join(text for text, is_so in differences.items() if is_so)}"


def _describe_windows(config: CheckpointConfig) -> Iterator[str]:
    if config.sliding_window is None:
        return
    layers = ", ".join(map(str, config.full_layers))
    but = f" in all layers but {layers}" if layers else ""
    base = "" if config.local_rotary_base is None else f", with rotary base {config.local_rotary_base:g}"
    yield f"attention window: {config.sliding_window} tokens{but}{base}"


def _describe_head(path: Path, target_path: Path | None) -> Iterator[str]:
    target = None if target_path is None else open_source(target_path, "float32").config
    if _is_model(path):  # with Medusa heads inside, which were tuned with it
        target = target or open_source(path, "float32").config
    is_medusa = any((path / name).is_file() for name in MEDUSA_FILES) or holds_medusa_heads(open_weights(path))
    if is_medusa:
        head = read_medusa(path, target or _target(*medusa_sizes(path), 1), "float32")
    else:
        head = read_eagle(path, target or _sizes_of(load_json(path / "config.json")), "float32")
    config = head.config
    is_eagle3 = config.method == "eagle3"
    names_no_layers = is_eagle3 and target is None and not written_ids(load_json(path / "config.json"))
    if names_no_layers:
        config = replace(config, captured_layers=(), notes=config.notes[1:])
    yield from describe_head(config, target)
    if names_no_layers:
        yield "reads the outputs of layers 1, n // 2 - 1 and n - 4 of a target of n layers: config.json names none"
    yield _parameters(head.wanted, head.tensors)
    if config.captured_layer_readings:
        readings = " or ".join(str(list(layers)) for layers in config.captured_layer_readings)
        yield (
            f"the check stage measures which layers are meant: {readings}"
            if not names_no_layers
            else ("the check stage measures whether neighbours of these layers are meant")
        )
    if target is None:
        yield "not compared with a target: --target CHECKPOINT names one"
    elif target_path is not None and all((folder / TOKENIZER_FILE).is_file() for folder in (path, target_path)):
        check_same_tokens(target_path, path, target.vocab_size)
        yield "its tokenizer is the target's"


def _parameters(wanted: Iterable[TargetTensor], tensors: Mapping[str, SourceTensor]) -> str:
    wanted = list(wanted)
    count = sum(math.prod(tensor.shape) for tensor in wanted)
    dtypes = sorted({tensors[name].dtype for tensor in wanted for name, _ in tensor.sources})
    return f"{count / 1e6:,.1f} million parameters of its own, in {' and '.join(dtypes)}"


def _sizes_of(raw: JsonObject) -> CheckpointConfig:
    """Make a target that the head's configuration fits, as deep as its ids tell."""
    layers = raw if raw.get("transformer_layer_config") is None else speculators_layers(raw)
    hidden = layers.integer("hidden_size")
    ids = written_ids(raw) or (0,)
    depths = (ids[-1] + 4, ids[-1] + 3)  # of targets whose default, as outputs and as inputs, the ids may be
    defaults = {depths[0]: ids, depths[1]: tuple(layer - 1 for layer in ids)}
    depth = next((depth for depth, wanted in defaults.items() if default_layers(depth) == wanted), max(ids[-1] + 1, 32))
    return _target(layers.integer("vocab_size"), raw.integer("target_hidden_size", hidden), depth)


def _target(vocab_size: int, hidden_size: int, num_layers: int) -> CheckpointConfig:
    sizes: dict[str, Any] = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_size": hidden_size}
    return CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype="float32",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        intermediate_size=1,
        norm_epsilon=1e-5,
        rotary_base=1e4,
        max_position_embeddings=1,
        **sizes,
    )

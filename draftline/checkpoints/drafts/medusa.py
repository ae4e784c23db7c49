"""Read Medusa heads in every layout of ``MEDUSA_LAYOUTS``: a file of their own, or among the tensors of their model.

Source: the reference implementation (``medusa_model.py``) and ModelOpt's exporters. A head is residual blocks, then a
projection to the vocabulary, which heads that end in the target's lm_head do not have. Traps: ``medusa_num_heads`` is
wrong in published configurations, so heads are counted; Medusa-2 tunes the model with the heads, so its target is the
same checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.huggingface import WEIGHTS_FILES, open_plain_weights, open_safetensors, open_weights
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.names import IGNORED, MEDUSA_HEADS, TargetTensor, check_source_tensors, weight_map
from draftline.checkpoints.pytorch_file import open_pytorch_file
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class MedusaLayout:
    """A row of the import matrix: the names of residual block ``layer`` of ``head``, and of the head's projection.

    ``is_model``: the heads are among the tensors of a model. ``count_key``: of ``config.json``, where it tells how many
    heads there are and is right, so that the last one is missed.
    """

    name: str
    block: str
    projection: str
    is_model: bool = False
    count_key: str = ""


MEDUSA_LAYOUTS = (
    MedusaLayout("Medusa v1", "{head}.{layer}.linear", "{head}.{num_layers}"),
    MedusaLayout("Medusa-2", "medusa_head.{head}.{layer}.linear", "medusa_head.{head}.{num_layers}", is_model=True),
    MedusaLayout(
        "Medusa of ModelOpt", "medusa_heads.{head}.{layer}.linear", "medusa_heads.{head}.{num_layers}", is_model=True
    ),
    MedusaLayout(
        "Medusa of Megatron and ModelOpt",
        "medusa_heads.{head}.medusa_layers.{layer}.linear",
        "medusa_heads.{head}.lm_head",
        is_model=True,
    ),
    MedusaLayout("Medusa of vLLM", "blocks.{head}.layers.{layer}", "lm_heads.{head}", count_key="num_heads"),
)
_SHARED = "original_lm_head"  # of vLLM: the first projection is that of all heads
_CURE = f"use heads in one of the layouts {', '.join(layout.name for layout in MEDUSA_LAYOUTS)}"
_NUMBER = r"(0|[1-9]\d{0,3})"

# Where a configuration states the number of residual blocks: the keys that lead there.
_NUM_LAYERS_KEYS = (("medusa_num_layers",), ("medusa", "num_medusa_layers"))


def read_medusa(directory: Path, target: CheckpointConfig, dtype: str) -> SourceHead:
    """Read the headers of Medusa heads and check them against the target.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, or ``config.json`` contradicts them.
    """
    path, tensors = _open_heads(directory)
    layout, blocks = _recognise(tensors, path)
    num_heads, num_layers = (1 + max(numbers) for numbers in zip(*blocks, strict=True))
    _check_num_layers(directory / "config.json", num_layers)
    if layout.count_key and (directory / "config.json").is_file():
        stated = load_json(directory / "config.json")
        num_heads = max(num_heads, stated.optional_integer(layout.count_key) or 0)
        if stated.flag(_SHARED, False):
            layout = replace(layout, projection=layout.projection.replace("{head}", "0"))
    projections = {layout.projection.format(head=head, num_layers=num_layers) for head in range(num_heads)}
    config = HeadConfig(
        method="medusa",
        layout=layout.name,
        dtype=dtype,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        owns_medusa_biases=any(_blocks(layout, tensors, "bias")),
        owns_medusa_lm_heads=any(f"{name}.weight" in tensors for name in projections),
    )
    wanted = medusa_tensors(config, layout)
    of_model: set[str] = set()
    if layout.is_model:
        of_model = {name for tensor in weight_map(target) for name, _ in tensor.sources}
    check_source_tensors(
        wanted,
        tensors,
        path,
        kind=layout.name,
        is_ignored=lambda name: name in of_model or (layout.is_model and IGNORED.fullmatch(name) is not None),
        cure=_CURE,
    )
    return SourceHead(config, wanted, tensors)


def holds_medusa_heads(tensors: Mapping[str, SourceTensor]) -> bool:
    """Whether there are Medusa heads of some layout among ``tensors``."""
    return any(_blocks(layout, tensors) for layout in MEDUSA_LAYOUTS)


def medusa_sizes(directory: Path) -> tuple[int, int]:
    """Return vocab_size and hidden_size of heads in a file of their own; vocab_size 0 where nothing tells it.

    Raises: CheckpointError where there are no heads.
    """
    path, tensors = _open_heads(directory)
    layout, blocks = _recognise(tensors, path)
    head, layer = blocks[0]
    names = (f"{layout.block.format(head=head, layer=layer)}.{kind}" for kind in ("weight", "bias"))
    hidden_size = next(tensors[name].shape[0] for name in names if name in tensors)
    num_layers = 1 + max(layer for _, layer in blocks)
    projection = tensors.get(f"{layout.projection.format(head=head, num_layers=num_layers)}.weight")
    if projection is not None:
        return projection.shape[0], hidden_size
    config = directory / "config.json"
    return (load_json(config).optional_integer("vocab_size") or 0) if config.is_file() else 0, hidden_size


def medusa_tensors(config: HeadConfig, layout: MedusaLayout) -> list[TargetTensor]:
    """Return the tensors of converted Medusa heads, in file order, and what they are made of."""
    hidden, vocab = config.hidden_size, config.vocab_size
    wanted: list[TargetTensor] = []

    def add(key: str, source: str, *shape: int) -> None:
        wanted.append(TargetTensor(key, shape, ((source, shape),)))

    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            key, source = (
                f"medusa_heads.{head}.medusa_layers.{layer}.linear",
                layout.block.format(head=head, layer=layer),
            )
            add(f"{key}.weight", f"{source}.weight", hidden, hidden)
            if config.owns_medusa_biases:
                add(f"{key}.bias", f"{source}.bias", hidden)
        if config.owns_medusa_lm_heads:
            source = layout.projection.format(head=head, num_layers=config.num_layers)
            add(f"medusa_heads.{head}.lm_head.weight", f"{source}.weight", vocab, hidden)
    return wanted


def _open_heads(directory: Path) -> tuple[Path, Mapping[str, SourceTensor]]:
    """Open the file that holds heads alone or, where there is none, the model's; the path is for messages."""
    path = next((directory / name for name in MEDUSA_FILES if (directory / name).is_file()), None)
    if path is None:
        if not any((directory / name).exists() for name in WEIGHTS_FILES):
            rule = f"the folder holds one of {', '.join(MEDUSA_FILES + WEIGHTS_FILES)}"
            raise CheckpointError(directory, rule, "none of them", "give the folder of Medusa heads")
        return directory, _open_model(directory)
    return path, open_safetensors(path) if path.suffix == ".safetensors" else open_pytorch_file(path)


def _open_model(directory: Path) -> Mapping[str, SourceTensor]:
    """Open a model that may have heads among its tensors; the model may be quantised, and the heads not."""
    config = directory / "config.json"
    if not config.is_file():
        return open_weights(directory)
    tensors, quantization = open_plain_weights(directory, load_json(config), ())
    matrices = () if quantization is None else quantization.matrices
    if heads := [name for name in matrices if MEDUSA_HEADS.fullmatch(name)]:
        cure = "use the heads that they were quantised from"
        raise CheckpointError(directory, "Medusa heads are not quantised", f"{heads[0]} in codes", cure)
    return tensors


def _recognise(tensors: Mapping[str, SourceTensor], path: Path) -> tuple[MedusaLayout, list[tuple[int, int]]]:
    """Return the layout, and the head and layer of every tensor of a residual block."""
    for layout in MEDUSA_LAYOUTS:
        if blocks := _blocks(layout, tensors):
            return layout, blocks
    got = ", ".join(list(tensors)[:3]) or "no tensors"
    rule = f"the file holds tensors {' or '.join(f'{layout.block}.weight' for layout in MEDUSA_LAYOUTS)}"
    raise CheckpointError(path, rule, got, _CURE)


def _blocks(
    layout: MedusaLayout, tensors: Mapping[str, SourceTensor], kinds: str = "weight|bias"
) -> list[tuple[int, int]]:
    escaped = re.escape(layout.block).replace(r"\{head\}", _NUMBER).replace(r"\{layer\}", _NUMBER)
    pattern = re.compile(rf"{escaped}\.({kinds})")
    return [(int(match[1]), int(match[2])) for name in tensors if (match := pattern.fullmatch(name))]


def _check_num_layers(path: Path, num_layers: int) -> None:
    if not path.is_file():
        return
    config = load_json(path)
    for keys in _NUM_LAYERS_KEYS:
        owner = config
        for key in keys[:-1]:
            inner = owner.get(key)
            owner = JsonObject(path, inner if isinstance(inner, dict) else {})
        if owner.optional_integer(keys[-1]) not in (None, num_layers):
            rule = f"the {num_layers} residual blocks of the file's heads"
            raise owner.error(keys[-1], rule, owner.get(keys[-1]))

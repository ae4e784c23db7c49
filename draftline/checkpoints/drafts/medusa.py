"""Read Medusa v1 heads: ``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``.

Source: the reference implementation (``medusa_model.py``). Tensors are named ``{head}.{layer}.linear.weight``,
``{head}.{layer}.linear.bias`` and ``{head}.{num_layers}.weight``, the vocabulary projection, which heads that end in
the target's lm_head do not have. Trap: ``medusa_num_heads`` is wrong in published configurations, so heads are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.huggingface import open_safetensors
from draftline.checkpoints.json_object import load_json
from draftline.checkpoints.names import TargetTensor, check_source_tensors
from draftline.checkpoints.pytorch_file import open_pytorch_file
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")

_BLOCK = re.compile(r"(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.linear\.(?:weight|bias)")
_PROJECTION = re.compile(r"\d+\.\d+\.weight")


def read_medusa(directory: Path, target: CheckpointConfig, dtype: str) -> SourceHead:
    """Read the headers of Medusa heads and check them against the target.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape, or ``config.json`` contradicts them.
    """
    path = next((directory / name for name in MEDUSA_FILES if (directory / name).is_file()), None)
    if path is None:
        rule = f"the folder holds one of {', '.join(MEDUSA_FILES)}"
        raise CheckpointError(directory, rule, "none of them", "give the folder of Medusa heads")
    tensors = open_safetensors(path) if path.suffix == ".safetensors" else open_pytorch_file(path)
    num_heads, num_layers = _count_heads(tensors, path)
    _check_num_layers(directory / "config.json", num_layers)
    config = HeadConfig(
        method="medusa",
        dtype=dtype,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        owns_medusa_lm_heads=any(_PROJECTION.fullmatch(name) for name in tensors),
    )
    wanted = medusa_tensors(config)
    cure = "use heads in the layout of the reference implementation (Medusa v1)"
    check_source_tensors(wanted, tensors, path, kind="Medusa heads", is_ignored=lambda name: False, cure=cure)
    return SourceHead(config, wanted, tensors)


def medusa_tensors(config: HeadConfig) -> list[TargetTensor]:
    """Return the tensors of converted Medusa heads, in file order, and what they are made of."""
    hidden, vocab = config.hidden_size, config.vocab_size
    wanted: list[TargetTensor] = []

    def add(key: str, source: str, *shape: int) -> None:
        wanted.append(TargetTensor(key, shape, ((source, shape),)))

    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            key = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            add(f"{key}.weight", f"{head}.{layer}.linear.weight", hidden, hidden)
            add(f"{key}.bias", f"{head}.{layer}.linear.bias", hidden)
        if config.owns_medusa_lm_heads:
            add(f"medusa_heads.{head}.lm_head.weight", f"{head}.{config.num_layers}.weight", vocab, hidden)
    return wanted


def _count_heads(tensors: Mapping[str, SourceTensor], path: Path) -> tuple[int, int]:
    blocks = [(int(match[1]), int(match[2])) for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not blocks:
        got = ", ".join(list(tensors)[:3]) or "no tensors"
        cure = "use heads in the layout of the reference implementation (Medusa v1)"
        raise CheckpointError(path, "the file holds tensors {head}.{layer}.linear.weight", got, cure)
    return 1 + max(head for head, _ in blocks), 1 + max(layer for _, layer in blocks)


def _check_num_layers(path: Path, num_layers: int) -> None:
    if path.is_file() and load_json(path).optional_integer("medusa_num_layers") not in (None, num_layers):
        config = load_json(path)
        rule = f"the {num_layers} residual blocks of the file's heads"
        raise config.error("medusa_num_layers", rule, config.get("medusa_num_layers"))

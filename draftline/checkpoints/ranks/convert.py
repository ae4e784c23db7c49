"""Convert a published target, with Medusa heads or an EAGLE-1 head, to what ``trtllm-build`` reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.convert import check_tied_head, open_source
from draftline.checkpoints.converted import (
    check_destination,
    check_source_dtypes,
    converted_chunks,
    replace_directory,
)
from draftline.checkpoints.disk_space import check_free_space, disk_full_named
from draftline.checkpoints.drafts.eagle import read_eagle1
from draftline.checkpoints.drafts.medusa import read_medusa
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.dtypes import check_convertible_dtype, numpy_dtype
from draftline.checkpoints.names import TargetTensor, check_tensors
from draftline.checkpoints.ranks.config import write_layout_config
from draftline.checkpoints.ranks.layout import (
    DRAFT_PREFIX,
    Layout,
    Speculation,
    check_layout,
    eagle_shapes,
    medusa_shapes,
)
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.ranks.split import write_ranks
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.checkpoints.trtllm import CONFIG_FILE
from draftline.errors import CheckpointError

_READERS = {"medusa": read_medusa, "eagle1": read_eagle1}


@dataclass(frozen=True)
class HeadSource:
    """The folder of a head, and the static tree that its engine is built for, without the root."""

    folder: Path
    method: Literal["medusa", "eagle1"]
    num_draft_tokens: int
    max_depth: int
    max_non_leaves: int


def convert_for_ranks(
    source: Path,
    destination: Path,
    dtype: str,
    mapping: Mapping,
    head: HeadSource | None,
    progress: Callable[[int, int], None],
) -> Layout:
    """Convert ``source``, and the head beside it, into ``destination``: ``config.json``, ranks, tokenizer.

    Every source tensor is read once and written to the ranks that have a part of it. An EAGLE head without a bias of
    ``fc`` gets one of zeros, which the network asks for and which changes nothing. ``progress(done, total)`` is called
    in bytes of source tensors. A converted checkpoint that lies at ``destination`` is replaced.

    Raises:
        CheckpointError: as ``convert_checkpoint``; also where a size does not divide by the ranks, or TensorRT-LLM's
            layout cannot hold the network.
        MissingPackageError: the source needs a package that is not installed.
    """
    check_convertible_dtype(dtype, "target.dtype")
    check_destination(destination)
    checkpoint = open_source(source, dtype)
    layout = Layout(checkpoint.config, mapping)
    sources = dict(checkpoint.tensors)
    targets = check_tensors(checkpoint.config, checkpoint.tensors, checkpoint.where)
    check_source_dtypes(targets, checkpoint.tensors)
    check_tied_head(checkpoint)
    if head is not None:
        speculation, tensors = _open_head(head, checkpoint.config, dtype)
        layout = replace(layout, speculation=speculation)
        sources |= {DRAFT_PREFIX + name: tensor for name, tensor in tensors.items()}
    check_layout(layout)
    read = {name: shape for tensor in layout.tensors() for name, shape in tensor.sources}
    total = sum(map(math.prod, read.values())) * numpy_dtype(dtype).itemsize
    num_bytes = num_rank_bytes(layout, dtype)
    with replace_directory(destination) as directory, disk_full_named(destination, num_bytes):
        check_free_space(directory, num_bytes)
        checkpoint.write_tokenizer(directory)
        write_ranks(directory, layout, sources, dtype, lambda done: progress(done, total))
        write_layout_config(directory / CONFIG_FILE, layout)
    return layout


def num_rank_bytes(layout: Layout, dtype: str) -> int:
    """Return the bytes that the tensors of all ranks will have."""
    elements = sum(layout.mapping.tp_size * math.prod(layout.slice_of(tensor).shape) for tensor in layout.tensors())
    return elements * numpy_dtype(dtype).itemsize


def _open_head(head: HeadSource, target: CheckpointConfig, dtype: str) -> tuple[Speculation, dict[str, SourceTensor]]:
    if not head.folder.is_dir():
        raise CheckpointError(head.folder, "the draft checkpoint is a folder", "no such folder", "correct the path")
    found = _READERS[head.method](head.folder, target, dtype)
    check_source_dtypes(found.wanted, found.tensors)
    config = found.config
    tensors = {wanted.key: _converted(wanted, found, head.folder, dtype) for wanted in found.wanted}
    known = medusa_shapes(config) if head.method == "medusa" else eagle_shapes(config)
    layers = [layer for layer in range(1, config.num_layers) if head.method == "eagle1"]
    if unknown := [key for key in tensors if key not in known] or [f"layers.{layer}" for layer in layers]:
        rule = "TensorRT-LLM's network of such a draft has every tensor of it"
        cure = "set engine.backend to onnxruntime"
        raise CheckpointError(head.folder, rule, f"also {', '.join(unknown)}", cure)
    for key in [key for key in known if key.endswith(".bias") and key not in tensors]:
        zeros = np.zeros(known[key], numpy_dtype(dtype))
        tensors[key] = SourceTensor(head.folder, dtype, zeros.shape, partial(_one, zeros))
    return Speculation(config, head.num_draft_tokens, head.max_depth, head.max_non_leaves), tensors


def _one(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    return iter([values])


def _converted(wanted: TargetTensor, head: SourceHead, where: Path, dtype: str) -> SourceTensor:
    """Return a tensor of a converted head, whatever its source calls its parts."""

    def chunks() -> Iterator[NDArray[Any]]:
        for name, _ in wanted.sources:
            yield from converted_chunks(name, head.tensors[name], dtype)

    return SourceTensor(where, dtype, wanted.shape, chunks)

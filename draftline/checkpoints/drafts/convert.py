"""Convert a published draft head to the form that ``HeadConfig`` describes, streaming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.converted import (
    check_destination,
    check_source_dtypes,
    converted_entries,
    num_converted_bytes,
    replace_directory,
)
from draftline.checkpoints.disk_space import disk_full_named
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.eagle import read_eagle1, read_eagle3
from draftline.checkpoints.drafts.head_file import write_head_config
from draftline.checkpoints.drafts.medusa import read_medusa
from draftline.checkpoints.drafts.source_head import SourceHead
from draftline.checkpoints.dtypes import check_convertible_dtype
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE
from draftline.errors import CheckpointError

SourceMethod = Literal["eagle1", "eagle2", "eagle3", "medusa"]
HEAD_METHODS: tuple[str, ...] = get_args(SourceMethod)

_READERS: dict[str, Callable[[Path, CheckpointConfig, str], SourceHead]] = {
    "eagle1": read_eagle1,
    "eagle2": read_eagle1,  # another way to draft with the same head
    "eagle3": read_eagle3,
    "medusa": read_medusa,
}


def convert_head(
    source: Path,
    destination: Path,
    method: SourceMethod,
    target: CheckpointConfig,
    dtype: str,
    progress: Callable[[int, int], None],
    captured_layers: Sequence[int] | None = None,
) -> HeadConfig:
    """Convert the head in the folder ``source`` into ``destination`` and return its configuration.

    ``target`` is the model that the head was trained for: every size that they share is checked. ``dtype`` is
    ``float32``, ``float16`` or ``bfloat16``. ``progress(done, total)`` is called in bytes written. A converted
    checkpoint that lies at ``destination`` is replaced. ``captured_layers``: whose outputs an EAGLE-3 head reads
    (0-based), in the place of those that it names.

    Raises:
        CheckpointError: tensors are missing, unexpected, of another shape or not finite, the configuration contradicts
            them or the target, the disk is full, or ``destination`` holds something else.
        MissingPackageError: the source needs a package that is not installed.
    """
    check_convertible_dtype(dtype, "target.dtype")
    check_destination(destination)
    if not source.is_dir():
        raise CheckpointError(source, "the draft checkpoint is a folder", "no such folder", "correct the path")
    if captured_layers is None:
        head = _READERS[method](source, target, dtype)
    else:
        assert method == "eagle3", "others are refused"
        head = read_eagle3(source, target, dtype, captured_layers)
    check_source_dtypes(head.wanted, head.tensors)
    num_bytes = num_converted_bytes(head.wanted, dtype)
    with replace_directory(destination) as directory, disk_full_named(destination, num_bytes):
        entries = converted_entries(head.wanted, head.tensors, dtype, lambda done: progress(done, num_bytes))
        write_safetensors(directory / WEIGHTS_FILE, _offset_entries(head) + entries)
        write_head_config(directory / CONFIG_FILE, head.config)
    return head.config


def _offset_entries(head: SourceHead) -> list[TensorEntry]:
    # First in the file: its elements are the widest, so all tensors start at a multiple of their element size.
    offsets = head.vocabulary_offsets
    return [] if offsets is None else [TensorEntry("d2t", "int64", offsets.shape, lambda: [offsets])]

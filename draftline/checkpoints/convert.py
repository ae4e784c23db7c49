"""Convert a Hugging Face or GGUF checkpoint to TensorRT-LLM's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.converted import (
    check_destination,
    check_source_dtypes,
    converted_entries,
    num_converted_bytes,
    replace_directory,
)
from draftline.checkpoints.disk_space import disk_full_named
from draftline.checkpoints.dtypes import check_convertible_dtype
from draftline.checkpoints.gguf import open_gguf
from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.names import check_tensors
from draftline.checkpoints.safetensors_file import write_safetensors
from draftline.checkpoints.source_tensor import SourceCheckpoint
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE, write_checkpoint_config
from draftline.checkpoints.weight_rules import EMBEDDING, LM_HEAD
from draftline.errors import CheckpointError


def convert_checkpoint(
    source: Path, destination: Path, dtype: str, progress: Callable[[int, int], None]
) -> CheckpointConfig:
    """Convert ``source`` (a Hugging Face folder, a ``.gguf`` file or a folder with one) into ``destination``.

    ``dtype`` is ``float32``, ``float16`` or ``bfloat16``. ``progress(done, total)`` is called in bytes written. A
    converted checkpoint that lies at ``destination`` is replaced.

    Raises:
        CheckpointError: the source is incomplete, damaged or not supported, a weight is not finite or overflows
            ``dtype``, the tokenizer does not fit, the disk is full, or ``destination`` holds something else.
        MissingPackageError: the source needs a package that is not installed.
    """
    check_convertible_dtype(dtype, "target.dtype")
    check_destination(destination)
    checkpoint = open_source(source, dtype)
    targets = check_tensors(checkpoint.config, checkpoint.tensors, checkpoint.where)
    check_source_dtypes(targets, checkpoint.tensors)
    check_tied_head(checkpoint)
    num_bytes = num_converted_bytes(targets, dtype)
    with replace_directory(destination) as directory, disk_full_named(destination, num_bytes):
        checkpoint.write_tokenizer(directory)
        entries = converted_entries(targets, checkpoint.tensors, dtype, lambda done: progress(done, num_bytes))
        write_safetensors(directory / WEIGHTS_FILE, entries)
        write_checkpoint_config(directory / CONFIG_FILE, checkpoint.config)
    return checkpoint.config


def open_source(source: Path, dtype: str) -> SourceCheckpoint:
    """Open a checkpoint of either kind; ``dtype`` is recorded in its configuration.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
    """
    if source.is_file() and source.suffix == ".gguf":
        return open_gguf(source, dtype)
    if not source.is_dir():
        cure = "give the folder of a Hugging Face checkpoint or a .gguf file"
        raise CheckpointError(source, "the checkpoint exists", "no such folder", cure)
    files = sorted(source.glob("*.gguf"))
    if (source / "config.json").exists() or not files:
        return open_huggingface(source, dtype)
    if len(files) > 1:
        got = ", ".join(file.name for file in files)
        raise CheckpointError(source, "the folder holds one .gguf file", got, "name the file itself")
    return open_gguf(files[0], dtype)


def check_tied_head(checkpoint: SourceCheckpoint) -> None:
    """Raise CheckpointError where a head beside a tied embedding is not the very same tensor."""
    if not checkpoint.config.share_embedding_table or LM_HEAD.key not in checkpoint.tensors:
        return
    head, embedding = checkpoint.tensors[LM_HEAD.key], checkpoint.tensors[EMBEDDING.sources[0]]
    same = head.shape == embedding.shape and head.dtype == embedding.dtype
    if not same or not all(
        np.array_equal(left.view(np.uint8), right.view(np.uint8))
        for left, right in zip(head.chunks(), embedding.chunks(), strict=True)
    ):
        rule = "lm_head.weight equals model.embed_tokens.weight where tie_word_embeddings is true"
        raise CheckpointError(checkpoint.where, rule, "another tensor", "set tie_word_embeddings to false")

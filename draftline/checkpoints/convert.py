"""Convert a Hugging Face or GGUF checkpoint to TensorRT-LLM's format, streaming.

One chunk of one tensor is in memory at a time. The converted checkpoint is written beside its destination and renamed
into place when it is whole.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.disk_space import disk_full_named
from draftline.checkpoints.dtypes import EXPONENT_BITS, check_convertible_dtype, is_finite, numpy_dtype
from draftline.checkpoints.gguf import open_gguf
from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.names import EMBEDDING, LM_HEAD, TargetTensor, check_tensors
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from draftline.checkpoints.source_tensor import SourceCheckpoint, SourceTensor
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE, write_checkpoint_config
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
    _check_destination(destination)
    checkpoint = open_source(source, dtype)
    targets = check_tensors(checkpoint.config, checkpoint.tensors, checkpoint.where)
    _check_source_dtypes(targets, checkpoint)
    _check_tied_head(checkpoint)
    partial_directory = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial_directory, ignore_errors=True)
    partial_directory.mkdir(parents=True)
    num_bytes = sum(math.prod(target.shape) for target in targets) * numpy_dtype(dtype).itemsize
    try:
        with disk_full_named(destination, num_bytes):
            checkpoint.write_tokenizer(partial_directory)
            entries = _target_entries(targets, checkpoint, dtype, lambda done_bytes: progress(done_bytes, num_bytes))
            write_safetensors(partial_directory / WEIGHTS_FILE, entries)
            write_checkpoint_config(partial_directory / CONFIG_FILE, checkpoint.config)
        if destination.exists():
            shutil.rmtree(destination)
        os.replace(partial_directory, destination)
    finally:
        shutil.rmtree(partial_directory, ignore_errors=True)
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


def _check_destination(destination: Path) -> None:
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return
    if not (destination / CONFIG_FILE).is_file() or not (destination / WEIGHTS_FILE).is_file():
        rule = "the destination is new, empty or a converted checkpoint"
        raise CheckpointError(destination, rule, "something else", "choose another folder")


def _check_source_dtypes(targets: list[TargetTensor], checkpoint: SourceCheckpoint) -> None:
    for target in targets:
        for name, _ in target.sources:
            tensor = checkpoint.tensors[name]
            if tensor.dtype not in EXPONENT_BITS:
                rule = f"tensor {name} has one of the dtypes {', '.join(EXPONENT_BITS)}"
                raise CheckpointError(tensor.where, rule, tensor.dtype, "use the checkpoint it was quantised from")


def _check_tied_head(checkpoint: SourceCheckpoint) -> None:
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


def _target_entries(
    targets: list[TargetTensor], checkpoint: SourceCheckpoint, dtype: str, progress: Callable[[int], None]
) -> list[TensorEntry]:
    done_bytes = 0

    def chunks(target: TargetTensor) -> Iterator[NDArray[Any]]:
        nonlocal done_bytes
        for name, _ in target.sources:
            for chunk in _converted_chunks(name, checkpoint.tensors[name], dtype):
                yield chunk
                done_bytes += chunk.nbytes
                progress(done_bytes)

    return [TensorEntry(target.key, dtype, target.shape, partial(chunks, target)) for target in targets]


def _converted_chunks(name: str, tensor: SourceTensor, dtype: str) -> Iterator[NDArray[Any]]:
    """Yield a tensor's chunks in ``dtype``, rounding to nearest even; every element read and written is finite."""
    for chunk in tensor.chunks():
        if not is_finite(chunk, tensor.dtype):
            got = "NaN or infinity"
            raise CheckpointError(tensor.where, f"tensor {name} is finite", got, "fetch or train the checkpoint again")
        if tensor.dtype == dtype:
            yield chunk
            continue
        with np.errstate(over="ignore"):  # found below, with the tensor's name
            converted = chunk.astype(numpy_dtype(dtype))
        if not is_finite(converted, dtype):
            largest = float(np.abs(chunk.astype(np.float32)).max())
            cure = "set target.dtype to bfloat16 or float32"
            raise CheckpointError(tensor.where, f"tensor {name} fits {dtype}", f"a weight of size {largest}", cure)
        yield converted

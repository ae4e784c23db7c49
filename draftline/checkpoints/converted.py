"""Write converted tensors, streaming: one chunk of one tensor is in memory at a time.

A converted checkpoint is written beside its destination and renamed into place when it is whole.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import EXPONENT_BITS, is_finite, numpy_dtype
from draftline.checkpoints.names import TargetTensor
from draftline.checkpoints.quantized.stored import stored_rows
from draftline.checkpoints.safetensors_file import TensorEntry
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE
from draftline.errors import CheckpointError


def check_destination(destination: Path) -> None:
    """Raise CheckpointError unless ``destination`` is new, an empty folder or a converted checkpoint."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return
    if not (destination / CONFIG_FILE).is_file() or not (destination / WEIGHTS_FILE).is_file():
        rule = "the destination is new, empty or a converted checkpoint"
        raise CheckpointError(destination, rule, "something else", "choose another folder")


def check_source_dtypes(wanted: Sequence[TargetTensor], tensors: Mapping[str, SourceTensor]) -> None:
    """Raise CheckpointError unless all tensors that will be converted have a dtype that can be."""
    for target in wanted:
        for name, _ in target.sources:
            tensor = tensors[name]
            if tensor.dtype not in EXPONENT_BITS:
                rule = f"tensor {name} has one of the dtypes {', '.join(EXPONENT_BITS)}"
                raise CheckpointError(tensor.where, rule, tensor.dtype, "use the checkpoint it was quantised from")


@contextlib.contextmanager
def replace_directory(destination: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``destination`` that takes its place unless an error leaves the block."""
    partial_directory = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial_directory, ignore_errors=True)
    partial_directory.mkdir(parents=True)
    try:
        yield partial_directory
        if destination.exists():
            shutil.rmtree(destination)
        os.replace(partial_directory, destination)
    finally:
        shutil.rmtree(partial_directory, ignore_errors=True)


def num_converted_bytes(wanted: Sequence[TargetTensor], dtype: str) -> int:
    """Return the bytes that the tensors will have."""
    return sum(math.prod(target.shape) * numpy_dtype(target.dtype(dtype)).itemsize for target in wanted)


def converted_entries(
    wanted: Sequence[TargetTensor], tensors: Mapping[str, SourceTensor], dtype: str, progress: Callable[[int], None]
) -> list[TensorEntry]:
    """Return what ``write_safetensors`` needs; ``progress`` is called with the bytes written so far."""
    done_bytes = 0

    def chunks(target: TargetTensor) -> Iterator[NDArray[Any]]:
        nonlocal done_bytes
        for name, _ in target.sources:
            tensor = _by_matrix(tensors[name], target.num_in_turn) if target.num_in_turn else tensors[name]
            for chunk in converted_chunks(name, _part(tensor, target.part), dtype):
                if target.addend:
                    chunk = chunk.astype(np.float32) + np.float32(target.addend)
                yield chunk
                done_bytes += chunk.nbytes
                progress(done_bytes)

    return [TensorEntry(target.key, target.dtype(dtype), target.shape, partial(chunks, target)) for target in wanted]


def _part(tensor: SourceTensor, part: tuple[int, int]) -> SourceTensor:
    """Return the part i of n equal ones of a tensor's rows; ``part`` is (i, n)."""
    index, num_parts = part
    num_elements = math.prod(tensor.shape)
    first, last = (num_elements * end // num_parts for end in (index, index + 1))

    def chunks() -> Iterator[NDArray[Any]]:
        position = 0
        for chunk in tensor.chunks():
            wanted = chunk[max(0, first - position) : max(0, last - position)]
            position += len(chunk)
            if wanted.size:
                yield wanted
            if position >= last:
                return

    return tensor if num_parts == 1 else replace(tensor, chunks=chunks)


def _by_matrix(tensor: SourceTensor, num_in_turn: int) -> SourceTensor:
    """Transpose every matrix of ``[matrices, in, out]``, or of vectors ``[matrices, out]``, one in memory at a time.

    Outputs of ``num_in_turn`` kinds take turns; afterwards each kind is together, the last one first.
    """
    by_matrix = replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))

    def chunks() -> Iterator[NDArray[Any]]:
        for matrix in stored_rows(by_matrix, 1):
            by_kind = matrix.reshape(-1, tensor.shape[-1] // num_in_turn, num_in_turn)
            yield by_kind[:, :, ::-1].transpose(2, 1, 0).reshape(-1)

    return replace(tensor, chunks=chunks)


def converted_chunks(name: str, tensor: SourceTensor, dtype: str) -> Iterator[NDArray[Any]]:
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

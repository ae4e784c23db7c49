"""What an engine's file of weights holds of a checkpoint: its matrices in their engine form, and all other tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.safetensors_file import TensorEntry, TensorLocation, map_tensor
from draftline.quantization import (
    TILE,
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)
from draftline.sessions.gpu_weight_forms import GpuForm
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.stored_matrices import WIDE_PROJ, StoredMatrix, stored_matrices, stored_vectors

_QUANTIZED_SUFFIXES = {"int8": ("int8", "scale"), "int4": ("int4", "scale", "zero")}
_QUANTIZE: dict[tuple[Kernels, str], Callable[[NDArray[Any]], tuple[NDArray[Any], ...]]] = {
    ("onnxruntime", "int8"): lambda weight: quantize_int8_blocks(weight.astype(np.float32)),
    ("onnxruntime", "int4"): lambda weight: quantize_int4_blocks(weight.astype(np.float32)),
    ("native", "int8"): quantize_int8_tiles,
    ("native", "int4"): quantize_int4_tiles,
}


def wide_entries(source: Path, dtype: str) -> Iterator[TensorEntry]:
    """The matrices that a linked checkpoint does not hold as they are multiplied."""
    for matrix in stored_matrices(source, has_wide_experts=True):
        if matrix.name.endswith(WIDE_PROJ):
            yield TensorEntry(f"{matrix.name}.weight", dtype, matrix.shape, matrix.slices)


def coded_entries(source: Path, dtype: str, form: GpuForm, outer: tuple[str, ...]) -> Iterator[TensorEntry]:
    """Entries of every matrix in ``form``, beside the checkpoint's tensors; those of ``outer`` stay as they are."""
    for matrix in stored_matrices(source, has_wide_experts=True):
        if matrix.name in outer or matrix.is_router:
            continue
        form.check_inputs(matrix.name, matrix.shape[1])
        parts = zip(form.suffixes, ("uint8", dtype), form.shapes(*matrix.shape), strict=True)
        names = [(f"{matrix.name}.weight_{suffix}", part_dtype, shape) for suffix, part_dtype, shape in parts]
        yield from _quantized_entries(matrix, form.quantize, names)


def weight_entries(
    source: Path, weights_dtype: str, kernels: Kernels, outer: tuple[str, ...], form: GpuForm | None = None
) -> list[TensorEntry]:
    """Entries of every tensor in its engine form, the matrices of ``outer`` first.

    ``form``: of float32 matrices, which hold what it rounds to; those of ``outer`` stay as they are.
    """
    matrices = stored_matrices(source, has_wide_experts=kernels != "native")
    outer_dtype = "int8" if weights_dtype == "int4" else weights_dtype
    entries: list[TensorEntry] = []
    for matrix in sorted(matrices, key=lambda matrix: matrix.name not in outer):
        if matrix.name in outer or matrix.is_router:
            entries += _matrix_entries(matrix, "float32" if matrix.is_router else outer_dtype, kernels, None)
        else:
            entries += _matrix_entries(matrix, weights_dtype, kernels, form)
    return entries + [_vector_entry(source, name, parts) for name, parts in stored_vectors(source).items()]


def _matrix_entries(matrix: StoredMatrix, dtype: str, kernels: Kernels, form: GpuForm | None) -> list[TensorEntry]:
    if form is not None:
        form.check_inputs(matrix.name, matrix.shape[-1])
    if dtype == "float32":
        convert = _widened if form is None else form.rounded
        chunks = functools.partial(lambda slices: map(convert, slices()), matrix.slices)
        return [TensorEntry(f"{matrix.name}.weight", "float32", matrix.shape, chunks)]
    quantize, (*experts, out, size) = _QUANTIZE[kernels, dtype], matrix.shape
    layout, num_rows = ("_tiles", -(-out // TILE)) if kernels == "native" else ("", out)
    shapes = [part.shape[1:] for part in quantize(np.zeros((1, size), np.float32))]
    names = [
        (
            f"{matrix.name}.weight_{suffix}{layout}",
            "float32" if suffix == "scale" else "uint8",
            (*experts, num_rows, *shape),
        )
        for suffix, shape in zip(_QUANTIZED_SUFFIXES[dtype], shapes, strict=True)
    ]
    return _quantized_entries(matrix, quantize, names)


def _quantized_entries(
    matrix: StoredMatrix,
    quantize: Callable[[NDArray[Any]], tuple[NDArray[Any], ...]],
    parts: Sequence[tuple[str, str, tuple[int, ...]]],
) -> list[TensorEntry]:
    """Entries of ``parts`` (name, dtype, shape): the codes, then what is small beside them and waits for its turn.

    They are written one after another and once, so a matrix is read and quantised once, one slice at a time.
    """
    waiting: list[list[NDArray[Any]]] = []

    def codes() -> Iterator[NDArray[Any]]:
        for rows in matrix.slices():
            first, *rest = quantize(rows)
            waiting.append(rest)
            yield first

    def rest(index: int) -> Iterator[NDArray[Any]]:
        yield from (arrays[index] for arrays in waiting)
        if index == len(parts) - 2:
            waiting.clear()

    chunks: list[Callable[[], Iterator[NDArray[Any]]]] = [codes]
    chunks += (functools.partial(rest, index) for index in range(len(parts) - 1))
    return [TensorEntry(*part, part_chunks) for part, part_chunks in zip(parts, chunks, strict=True)]


def _vector_entry(source: Path, name: str, parts: Sequence[TensorLocation]) -> TensorEntry:
    def chunks() -> list[NDArray[Any]]:
        arrays = [map_tensor(source, part) for part in parts]
        return arrays if parts[0].dtype == "int64" else [_widened(array) for array in arrays]

    dtype = "int64" if parts[0].dtype == "int64" else "float32"
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return TensorEntry(name, dtype, shape, chunks)


def _widened(array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32)

"""The tensors of a converted checkpoint as an engine keeps them: linked as they are, or quantised or cast."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.checkpoints.safetensors_file import TensorEntry, map_tensor, tensor_locations, write_safetensors
from draftline.graphs.onnx_graph import TensorLocation
from draftline.quantization import (
    TILE,
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)
from draftline.sessions.gpu_weight_forms import GPU_FORMS, GpuForm
from draftline.sessions.native_kernels import Kernels

CHECKPOINT_FILE, WEIGHTS_FILE = "rank0.safetensors", "weights.safetensors"
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
}
_QUANTIZED_SUFFIXES = {"int8": ("int8", "scale"), "int4": ("int4", "scale", "zero")}
_QUANTIZE: dict[tuple[Kernels, str], Callable[[NDArray[Any]], tuple[NDArray[Any], ...]]] = {
    ("onnxruntime", "int8"): lambda weight: quantize_int8_blocks(weight.astype(np.float32)),
    ("onnxruntime", "int4"): lambda weight: quantize_int4_blocks(weight.astype(np.float32)),
    ("native", "int8"): quantize_int8_tiles,
    ("native", "int4"): quantize_int4_tiles,
}
_FC, _GATE, _FC_GATE = ".mlp.fc.", ".mlp.gate.", ".mlp.fc_gate."


@dataclass(frozen=True)
class EngineWeights:
    """The tensors of one checkpoint: ``entries`` go to ``file``.

    ``source`` is the checkpoint's tensor file where it is hard-linked beside the graph as ``linked_file`` (copied
    across file systems), and read in place; None where ``entries`` hold its tensors, quantised or cast.
    """

    file: str
    entries: tuple[TensorEntry, ...]
    linked_file: str
    source: Path | None

    def write(self, destination: Path, report: Callable[[], None]) -> dict[str, TensorLocation]:
        """Write into the folder ``destination``; ``report`` is called after each entry. Returns where tensors lie."""
        write_safetensors(destination / self.file, [_reported(entry, report) for entry in self.entries])
        locations = _locations(destination / self.file)
        if self.source is not None:
            _link(self.source, destination / self.linked_file)
            locations |= _join_fc_gate(_locations(destination / self.linked_file))
        return locations


def read_engine_weights(
    checkpoint: Path,
    dtype: str,
    weights_dtype: str,
    kernels: Kernels,
    *,
    outer: tuple[str, ...],
    first: tuple[TensorEntry, ...],
    file: str,
    linked_file: str,
    rounded_as: str | None = None,
) -> EngineWeights:
    """Describe the tensors of the converted checkpoint in the folder ``checkpoint``, whose matrices are of ``dtype``.

    Quantised matrices are laid out for the products of ``kernels``; those of ``GPU_FORMS`` are TensorRT's.

    ``outer`` names the matrices from and to the vocabulary. They stay int8 beside int4 layers, and as they are beside
    TensorRT's forms: they carry most of the quality. ``first`` are entries of ``file`` that are not the checkpoint's.

    ``rounded_as``: one of TensorRT's forms; matrices of float32 then hold what it rounds them to.

    Raises: BuildError for a matrix that a form does not take.
    """
    source = checkpoint / CHECKPOINT_FILE
    if rounded_as is not None:
        assert weights_dtype == "float32", "what is rounded is widened"
        entries = _weight_entries(source, "float32", kernels, outer, GPU_FORMS[rounded_as])
        return EngineWeights(file, (*first, *entries), linked_file, None)
    if weights_dtype in GPU_FORMS:
        entries = list(_coded_entries(source, dtype, GPU_FORMS[weights_dtype], outer))
        return EngineWeights(file, (*first, *entries), linked_file, source)
    if dtype == weights_dtype:
        return EngineWeights(file, first, linked_file, source)
    return EngineWeights(file, (*first, *_weight_entries(source, weights_dtype, kernels, outer)), linked_file, None)


def _coded_entries(source: Path, dtype: str, form: GpuForm, outer: tuple[str, ...]) -> Iterator[TensorEntry]:
    """Entries of every matrix in ``form``, beside the checkpoint's tensors; those of ``outer`` stay as they are."""
    tensors = tensor_locations(source)

    @functools.lru_cache(maxsize=1)
    def quantized(names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
        return form.quantize(np.concatenate([map_tensor(source, tensors[name]) for name in names]))

    for name, tensor in tensors.items():
        stem, kind = name.replace(_FC, _FC_GATE).rpartition(".")[::2]
        if stem in outer or _GATE in name or kind != "weight" or len(tensor.shape) != 2:
            continue
        sources = (name, name.replace(_FC, _GATE)) if _FC in name else (name,)
        out, size = sum(tensors[part].shape[0] for part in sources), tensor.shape[1]
        form.check_inputs(name, size)
        parts = zip(form.suffixes, ("uint8", dtype), form.shapes(out, size), strict=True)
        for index, (suffix, part_dtype, shape) in enumerate(parts):
            chunks = functools.partial(lambda names, index: [quantized(names)[index]], sources, index)
            yield TensorEntry(f"{stem}.weight_{suffix}", part_dtype, shape, chunks)


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)


def _locations(path: Path) -> dict[str, TensorLocation]:
    return {
        name: TensorLocation(path.name, tensor.byte_offset, tensor.num_bytes, ONNX_TYPES[tensor.dtype], tensor.shape)
        for name, tensor in tensor_locations(path).items()
    }


def _join_fc_gate(locations: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """Span ``mlp.fc`` and ``mlp.gate``, which the converter writes side by side, with one initializer."""
    joined = dict(locations)
    for name, fc in locations.items():
        if _FC not in name:
            continue
        gate = locations[name.replace(_FC, _GATE)]
        assert gate.offset == fc.offset + fc.num_bytes, "the converter writes mlp.gate right behind mlp.fc"
        shape = (fc.shape[0] + gate.shape[0], *fc.shape[1:])
        num_bytes = fc.num_bytes + gate.num_bytes
        joined[name.replace(_FC, _FC_GATE)] = TensorLocation(fc.file, fc.offset, num_bytes, fc.onnx_type, shape)
    return joined


def _weight_entries(
    source: Path, weights_dtype: str, kernels: Kernels, outer: tuple[str, ...], form: GpuForm | None = None
) -> list[TensorEntry]:
    """Entries of every tensor in its engine form. Parts of one matrix stand together and are computed once.

    ``form``: of float32 matrices, which hold what it rounds to; those of ``outer`` stay as they are.
    """
    tensors = tensor_locations(source)

    def stored(names: tuple[str, ...]) -> NDArray[Any]:
        parts = [map_tensor(source, tensors[name]) for name in names]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def read(*names: str) -> NDArray[np.float32]:
        return stored(names).astype(np.float32)

    @functools.lru_cache(maxsize=1)
    def quantized(names: tuple[str, ...], dtype: str) -> tuple[NDArray[Any], ...]:
        return _QUANTIZE[kernels, dtype](stored(names))

    def matrix(name: str, sources: tuple[str, ...], dtype: str) -> Iterator[TensorEntry]:
        out, size = sum(tensors[part].shape[0] for part in sources), tensors[sources[0]].shape[1]
        if form is not None and name not in outer:
            form.check_inputs(name, size)
            yield TensorEntry(f"{name}.weight", "float32", (out, size), lambda: [form.rounded(stored(sources))])
            return
        if dtype == "float32":
            yield TensorEntry(f"{name}.weight", "float32", (out, size), lambda: [read(*sources)])
            return
        layout, num_rows = ("_tiles", -(-out // TILE)) if kernels == "native" else ("", out)
        shapes = [part.shape[1:] for part in _QUANTIZE[kernels, dtype](np.zeros((1, size), np.float32))]
        for index, suffix in enumerate(_QUANTIZED_SUFFIXES[dtype]):
            kind = "float32" if suffix == "scale" else "uint8"
            chunks = functools.partial(lambda part: [quantized(sources, dtype)[part]], index)
            yield TensorEntry(f"{name}.weight_{suffix}{layout}", kind, (num_rows, *shapes[index]), chunks)

    def entries() -> Iterator[TensorEntry]:
        outer_dtype = "int8" if weights_dtype == "int4" else weights_dtype
        for name in outer:
            if f"{name}.weight" in tensors:
                yield from matrix(name, (f"{name}.weight",), outer_dtype)
        for name, tensor in tensors.items():
            stem, kind = name.replace(_FC, _FC_GATE).rpartition(".")[::2]
            if stem in outer or _GATE in name:
                continue
            sources = (name, name.replace(_FC, _GATE)) if _FC in name else (name,)
            if kind == "weight" and len(tensor.shape) == 2:
                yield from matrix(stem, sources, weights_dtype)
            elif tensor.dtype == "int64":
                yield TensorEntry(name, "int64", tensor.shape, functools.partial(_read_integers, source, name))
            else:
                shape = (sum(tensors[part].shape[0] for part in sources),)
                chunks = functools.partial(lambda parts: [read(*parts)], sources)
                yield TensorEntry(name.replace(_FC, _FC_GATE), "float32", shape, chunks)

    return list(entries())


def _read_integers(source: Path, name: str) -> list[NDArray[Any]]:
    return [map_tensor(source, tensor_locations(source)[name])]


def _reported(entry: TensorEntry, report: Callable[[], None]) -> TensorEntry:
    def chunks() -> Iterator[Any]:
        yield from entry.chunks()
        report()

    return entry._replace(chunks=chunks)

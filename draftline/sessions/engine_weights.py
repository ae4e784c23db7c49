"""The tensors of a converted checkpoint as an engine keeps them: linked as they are, or quantised or cast."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import TensorProto

from draftline.checkpoints.safetensors_file import TensorEntry, tensor_locations, write_safetensors
from draftline.graphs.onnx_graph import TensorLocation
from draftline.sessions.gpu_weight_forms import GPU_FORMS
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.stored_matrices import FC, FC_GATE, GATE, WIDE_FC
from draftline.sessions.weight_entries import coded_entries, weight_entries, wide_entries

CHECKPOINT_FILE, WEIGHTS_FILE = "rank0.safetensors", "weights.safetensors"
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int64": TensorProto.INT64,
}


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
            locations |= _with_joined(_locations(destination / self.linked_file))
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

    Quantised matrices are laid out for the products of ``kernels``; those of ``GPU_FORMS`` are TensorRT's. Experts are
    chosen among by native products, and one wide MLP for all others.

    ``outer`` names the matrices from and to the vocabulary. They stay int8 beside int4 layers, and as they are beside
    TensorRT's forms: they carry most of the quality. ``first`` are entries of ``file`` that are not the checkpoint's.

    ``rounded_as``: one of TensorRT's forms; matrices of float32 then hold what it rounds them to.

    Raises: BuildError for a matrix that a form does not take.
    """
    source = checkpoint / CHECKPOINT_FILE
    if rounded_as is not None:
        assert weights_dtype == "float32", "what is rounded is widened"
        entries = weight_entries(source, "float32", kernels, outer, GPU_FORMS[rounded_as])
        return EngineWeights(file, (*first, *entries), linked_file, None)
    if weights_dtype in GPU_FORMS:
        entries = list(coded_entries(source, dtype, GPU_FORMS[weights_dtype], outer))
        return EngineWeights(file, (*first, *entries), linked_file, source)
    if dtype == weights_dtype:
        entries = [] if kernels == "native" else list(wide_entries(source, dtype))
        return EngineWeights(file, (*first, *entries), linked_file, source)
    return EngineWeights(file, (*first, *weight_entries(source, weights_dtype, kernels, outer)), linked_file, None)


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


def _with_joined(locations: Mapping[str, TensorLocation]) -> dict[str, TensorLocation]:
    """Span with one initializer what stands side by side: ``mlp.fc`` and ``mlp.gate``, and the experts' ``mlp.fc``."""
    joined = dict(locations)
    for name, fc in locations.items():
        if f"{FC}." not in name or (name.endswith(".bias") and len(fc.shape) == 2):
            continue
        if len(fc.shape) == 3:
            joined[name.replace(FC, WIDE_FC)] = fc._replace(shape=(fc.shape[0] * fc.shape[1], fc.shape[2]))
            continue
        gate = locations[name.replace(FC, GATE)]
        assert gate.offset == fc.offset + fc.num_bytes, "the converter writes mlp.gate right behind mlp.fc"
        shape = (fc.shape[0] + gate.shape[0], *fc.shape[1:])
        num_bytes = fc.num_bytes + gate.num_bytes
        joined[name.replace(FC, FC_GATE)] = TensorLocation(fc.file, fc.offset, num_bytes, fc.onnx_type, shape)
    return joined


def _reported(entry: TensorEntry, report: Callable[[], None]) -> TensorEntry:
    def chunks() -> Iterator[Any]:
        yield from entry.chunks()
        report()

    return entry._replace(chunks=chunks)

"""The matrices of a converted checkpoint as graphs multiply with them, read slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.safetensors_file import TensorLocation, map_tensor, tensor_locations

FC, GATE, FC_GATE, ROUTER = ".mlp.fc", ".mlp.gate", ".mlp.fc_gate", ".mlp.router"
PROJ, WIDE_FC, WIDE_PROJ = ".mlp.proj", ".mlp.wide_fc", ".mlp.wide_proj"
SLICE_VALUES = 1 << 24  # of a matrix that all experts are put together to


class StoredMatrix(NamedTuple):
    """``shape``: ``[out, in]``, or ``[experts, out, in]`` of matrices that a row chooses among.

    ``slices`` are rows one after another, all there are, in the checkpoint's dtype; each expert is a slice.
    """

    name: str
    shape: tuple[int, ...]
    slices: Callable[[], Iterable[NDArray[Any]]]

    @property
    def is_router(self) -> bool:
        """Whether it chooses experts: then it is never rounded, for it is small and a choice is all or nothing."""
        return self.name.endswith(ROUTER)


def stored_matrices(source: Path, has_wide_experts: bool) -> list[StoredMatrix]:
    """Describe the matrices of the file ``source``; ``mlp.fc`` and ``mlp.gate`` of a dense layer are ``mlp.fc_gate``.

    ``has_wide_experts``: the experts of a layer are one MLP as wide as all of them, of ``mlp.wide_fc [experts * 2 *
    ffn, hidden]`` and ``mlp.wide_proj [hidden, experts * ffn]``.
    """
    tensors = tensor_locations(source)

    def rows_of(*names: str) -> Callable[[], Iterable[NDArray[Any]]]:
        return functools.partial(_joined, source, [tensors[name] for name in names])

    found = []
    for name, tensor in tensors.items():
        stem, kind = name.rpartition(".")[::2]
        if kind != "weight" or len(tensor.shape) < 2 or stem.endswith(GATE):
            continue
        if len(tensor.shape) == 3:
            found.append(_of_experts(source, stem, tensor, has_wide_experts))
        elif stem.endswith(FC):
            gate = f"{stem.removesuffix(FC)}{GATE}.weight"
            shape = (tensor.shape[0] + tensors[gate].shape[0], tensor.shape[1])
            found.append(StoredMatrix(stem.removesuffix(FC) + FC_GATE, shape, rows_of(name, gate)))
        else:
            found.append(StoredMatrix(stem, tensor.shape, rows_of(name)))
    return found


def stored_vectors(source: Path) -> dict[str, tuple[TensorLocation, ...]]:
    """Return all other tensors, by name, each with the parts it is joined of: biases of ``mlp.fc`` and ``mlp.gate``."""
    tensors = tensor_locations(source)
    found: dict[str, tuple[TensorLocation, ...]] = {}
    for name, tensor in tensors.items():
        if (len(tensor.shape) > 1 and name.endswith(".weight")) or f"{GATE}." in name:
            continue
        if f"{FC}." in name and len(tensor.shape) == 1:
            found[name.replace(f"{FC}.", f"{FC_GATE}.")] = (tensor, tensors[name.replace(f"{FC}.", f"{GATE}.")])
        else:
            found[name] = (tensor,)  # of experts [experts, out], as rows choose among them
    return found


def _joined(source: Path, parts: list[TensorLocation]) -> list[NDArray[Any]]:
    arrays = [map_tensor(source, part) for part in parts]
    return [np.concatenate(arrays)] if len(arrays) > 1 else arrays


def _of_experts(source: Path, stem: str, tensor: TensorLocation, is_wide: bool) -> StoredMatrix:
    count, rows, columns = tensor.shape

    def by_expert() -> Iterator[NDArray[Any]]:
        yield from map_tensor(source, tensor)

    def one_above_another() -> Iterator[NDArray[Any]]:
        stored, step = map_tensor(source, tensor).reshape(-1, columns), max(1, SLICE_VALUES // columns)
        for first in range(0, count * rows, step):
            yield stored[first : first + step]

    def side_by_side() -> Iterator[NDArray[Any]]:
        stored, step = map_tensor(source, tensor), max(1, SLICE_VALUES // (count * columns))
        for first in range(0, rows, step):
            yield np.concatenate(list(stored[:, first : first + step]), axis=1)

    if not is_wide:
        return StoredMatrix(stem, tensor.shape, by_expert)
    if stem.endswith(FC):
        return StoredMatrix(stem.removesuffix(FC) + WIDE_FC, (count * rows, columns), one_above_another)
    return StoredMatrix(stem.removesuffix(PROJ) + WIDE_PROJ, (rows, count * columns), side_by_side)

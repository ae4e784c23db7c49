"""Compile the kernels ahead of time: Triton language -> PTX -> cubin, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.kernels.shape import KernelConfiguration, KernelShape

ARCHITECTURES = (80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    - ``name``: ``tree_attention``, ``tree_attention_reduce`` or ``commit_rows``; ``entry``: its symbol in the cubin.
    - ``arguments``: in launch order, names from contract.yaml; ``argument_types``: of each, ``pointer``, ``int32``,
      ``int64`` or ``float32``. ``global_scratch`` and ``profile_scratch`` are the compiler's: null pointers.
    - A block has ``32 * num_warps`` threads and ``shared_bytes`` of dynamic shared memory (more than 48 KiB must be
      allowed by ``cuFuncSetAttribute`` first). Grids: ``draftline.kernels.launches``.
    """

    name: str
    architecture: int
    entry: str
    cubin: bytes
    ptx: str
    shared_bytes: int
    num_warps: int
    num_registers: int
    spill_bytes: int
    arguments: tuple[str, ...]
    argument_types: tuple[str, ...]


def compile_kernels(
    shape: KernelShape,
    architectures: Sequence[int],
    cache: Path | None = None,
    configuration: KernelConfiguration | None = None,
) -> tuple[CompiledKernel, ...]:
    """Compile the three kernels for each of ``architectures``, in that order."""
    raise NotImplementedError

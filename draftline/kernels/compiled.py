"""A kernel as it leaves the compiler."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.kernels.shape import KernelConfiguration


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture.

    - ``name``: ``tree_attention``, ``tree_attention_reduce`` or ``commit_rows``; ``entry``: its symbol in the cubin.
    - ``arguments``: in launch order, names from contract.yaml; ``argument_types``: of each, ``pointer`` (aligned to 16
      bytes), ``int32``, ``int64`` or ``float32``. ``global_scratch`` and ``profile_scratch``: null pointers.
    - A block has ``32 * num_warps`` threads and ``shared_bytes`` of dynamic shared memory (more than 48 KiB must be
      allowed by ``cuFuncSetAttribute`` first). Grids: ``draftline.kernels.launches``, for ``configuration``.
    - ``num_registers`` of a thread; ``spill_bytes``: stored and loaded by a thread because registers ran out.
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
    configuration: KernelConfiguration

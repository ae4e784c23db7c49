"""The kernel that writes accepted rows to a pool. Its code lies in the engine directory, one file beside each plan:
where an engine runs, nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.compilation import compile_kernels
from draftline.kernels.launches import commit_launch
from draftline.kernels.shape import KernelShape
from draftline.sessions.engine_config import PoolScales
from draftline.sessions.tensorrt.cuda_device import CudaDevice, aligned
from draftline.sessions.tensorrt.plugin_kernels import SCRATCH, PluginKernels, read_archive

NAME = "commit_rows"
INDEX_BYTES = 8


def commit_file(plan_file: str) -> str:
    """Name the file of the kernel that commits the rows of a plan: ``model.kernels`` of ``model.plan``."""
    return Path(plan_file).with_suffix(".kernels").name


def compile_commit_kernels(shape: KernelShape, architectures: Sequence[int], cache: Path) -> PluginKernels:
    """Compile the kernel for each of ``architectures``; ``cache`` keeps it. Raises: what ``compile_kernels`` raises."""
    compiled = compile_kernels(shape, architectures, cache)
    return PluginKernels(shape, tuple(kernel for kernel in compiled if kernel.name == NAME))


class CommitKernel:
    """The kernel on a GPU, with room for the indices of ``max_rows`` rows. ``scales``: of a float8 pool."""

    def __init__(self, device: CudaDevice, archive: Path, max_rows: int, scales: PoolScales) -> None:
        """Load the code for this GPU. Raises: ArtifactError where ``archive`` is damaged, or has none for it."""
        kernels = read_archive(archive.read_bytes())
        self._device = device
        self._kernel = kernels.find(NAME, kernels.fitting(device.architecture))
        self._function = device.driver.load_function(self._kernel.cubin, self._kernel.entry, self._kernel.shared_bytes)
        self._scales = 0  # null: nobody reads it
        if scales:
            self._scales = device.allocate("scales of the pool", 8 * len(scales))
            device.upload(self._scales, np.array(scales, np.float32))
        self._slots_at = aligned(max_rows * INDEX_BYTES)
        num_bytes = 2 * self._slots_at
        self._indices = device.allocate("indices of rows", num_bytes)
        self._staging = device.allocate_pinned(num_bytes)

    def enqueue(
        self,
        kv_rows: int,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        pool: int,
        num_layers: int,
        layer_stride: int,
    ) -> None:
        """Write rows ``rows[i]`` of the array at ``kv_rows`` to ``slots[i]`` of the pool, when the stream comes to it.

        ``layer_stride``: elements from a layer of the pool to the next.
        """
        count = len(rows)
        self._device.wait_for(self._staging)
        num_bytes = self._slots_at + count * INDEX_BYTES
        for first, values in ((0, rows), (self._slots_at, slots)):
            self._staging.bytes[first : first + count * INDEX_BYTES].view(np.int64)[:] = values
        self._device.copy_in(self._indices, self._staging, num_bytes)
        given: dict[str, int] = {
            "kv_rows": kv_rows,
            "rows": self._indices,
            "slots": self._indices + self._slots_at,
            "kv_pools": pool,
            "scales": self._scales,
            "layer_stride": layer_stride,
            **dict.fromkeys(SCRATCH, 0),
        }
        launch, kernel = commit_launch(count, num_layers), self._kernel
        arguments = [(kind, given[name]) for name, kind in zip(kernel.arguments, kernel.argument_types, strict=True)]
        self._device.driver.launch(
            self._function, launch.grid, 32 * kernel.num_warps, kernel.shared_bytes, self._device.stream, arguments
        )

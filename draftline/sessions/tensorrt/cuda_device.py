"""The GPU that sessions run on: its memory, one stream, and captured graphs, through CUDA's driver.

Source of names and constants: CUDA driver API, cuda.h (https://docs.nvidia.com/cuda/cuda-driver-api/).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DraftlineError
from draftline.sessions.tensorrt.cuda_driver import CudaDriver

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the stream does not wait for the default one
CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
ALIGNMENT = 256  # bytes: of cuMemAlloc's addresses, and of those that TensorRT takes


def aligned(num_bytes: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Rows:
    """Rows of ``row_bytes`` each in device memory, from ``address`` on."""

    address: int
    row_bytes: int


class PinnedMemory:
    """Host memory that the GPU reads and writes while the host goes on.

    ``in_flight``: the stream may not have read it yet; ``CudaDevice.wait_for`` comes before it is written again.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.in_flight = address, False
        self.bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


class CudaDevice:
    """Device 0, with its primary context: the one that TensorRT works in. Everything runs on one stream, in order.

    A CUDA context belongs to threads: every method that a thread calls first is preceded by ``activate`` in it.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.architecture = driver.architecture(0)
        self._device = driver.device(0)
        self._context = self.driver.handle("cuDevicePrimaryCtxRetain", self._device)
        self._threads = threading.local()
        self._memory: list[int] = []
        self._pinned: list[PinnedMemory] = []
        self.activate()
        self.stream = self.driver.handle("cuStreamCreate", NON_BLOCKING)

    def activate(self) -> None:
        """Make the context that of the calling thread."""
        if not getattr(self._threads, "is_active", False):
            self.driver.call("cuCtxSetCurrent", self._context)
            self._threads.is_active = True

    def free_bytes(self) -> int:
        """Return the memory that nobody has taken, other processes included."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, what: str, num_bytes: int) -> int:
        """Return the address of new memory, which lives until ``close``; its contents are any.

        Raises: DraftlineError, with ``what`` it is for, where the GPU has not so much.
        """
        address = ctypes.c_uint64()
        try:
            self.driver.call("cuMemAlloc_v2", ctypes.byref(address), max(num_bytes, ALIGNMENT))
        except DraftlineError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            rule = f"{what} fits in the GPU's memory, of which {self.free_bytes():,} bytes are free"
            cure = "lower engine.max_num_tokens or engine.max_batch_size, or end what else runs on the GPU"
            raise DraftlineError("engine", rule, f"{num_bytes:,} bytes", cure) from error
        self._memory.append(address.value)
        return address.value

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        """Return host memory that lives until ``close``."""
        address = self.driver.handle("cuMemAllocHost_v2", max(num_bytes, ALIGNMENT))
        self._pinned.append(PinnedMemory(address, num_bytes))
        return self._pinned[-1]

    def free_pinned(self, memory: PinnedMemory) -> None:
        """Release host memory before ``close``."""
        self.wait_for(memory)
        self._pinned.remove(memory)
        self.driver.call("cuMemFreeHost", memory.address)

    def upload(self, destination: int, values: NDArray[Any]) -> None:
        """Copy contiguous ``values`` to the device before returning."""
        assert values.flags.c_contiguous
        self.driver.call("cuMemcpyHtoD_v2", destination, values.ctypes.data, values.nbytes)

    def copy_in(self, destination: int, source: PinnedMemory, num_bytes: int) -> None:
        """Enqueue the copy of the first bytes of ``source``."""
        source.in_flight = True
        self.driver.call("cuMemcpyHtoDAsync_v2", destination, source.address, num_bytes, self.stream)

    def copy_out(self, destination: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy to the host address ``destination``, inside of pinned memory."""
        self.driver.call("cuMemcpyDtoHAsync_v2", destination, source, num_bytes, self.stream)

    def copy_rows(
        self,
        destination: Rows,
        places: NDArray[np.int64],
        source: Rows,
        rows: NDArray[np.int64],
        *,
        first_byte: int = 0,
    ) -> None:
        """Enqueue copies of ``rows[i]`` of ``source`` to ``places[i]`` of ``destination``: of their bytes from
        ``first_byte`` on as many as a row of the destination has. Rows that follow each other in both are one copy."""
        width = destination.row_bytes
        is_first = (np.diff(rows, prepend=-2) != 1) | (np.diff(places, prepend=-2) != 1)
        if width != source.row_bytes:
            is_first[:] = True
        for first, end in itertools.pairwise([*np.flatnonzero(is_first).tolist(), len(rows)]):
            to = destination.address + int(places[first]) * width
            start = source.address + int(rows[first]) * source.row_bytes + first_byte
            self.driver.call("cuMemcpyDtoDAsync_v2", to, start, (end - first) * width, self.stream)

    def wait_for(self, memory: PinnedMemory) -> None:
        """Wait until the stream has read ``memory``, if it still has to."""
        if memory.in_flight:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until the stream is done."""
        self.driver.call("cuStreamSynchronize", self.stream)
        for memory in self._pinned:
            memory.in_flight = False

    def capture(self, enqueue: Callable[[], None]) -> int:
        """Capture what ``enqueue`` puts on the stream, which does not run.

        Returns the graph's handle for ``launch``; it lives until ``destroy_graph``.
        """
        self.driver.call("cuStreamBeginCapture_v2", self.stream, CAPTURE_THREAD_LOCAL)
        try:
            enqueue()
        except BaseException:  # else the stream would stay in the capture
            self.driver.call("cuGraphDestroy", self._end_capture())
            raise
        graph = self._end_capture()
        executable = self.driver.handle("cuGraphInstantiateWithFlags", graph, 0)
        self.driver.call("cuGraphDestroy", graph)
        return executable

    def _end_capture(self) -> int:
        graph = ctypes.c_void_p()
        self.driver.call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        assert graph.value is not None
        return graph.value

    def launch(self, graph: int) -> None:
        """Enqueue a captured graph."""
        self.driver.call("cuGraphLaunch", graph, self.stream)

    def destroy_graph(self, graph: int) -> None:
        """Release a captured graph, before the engine whose kernels are in it."""
        self.driver.call("cuGraphExecDestroy", graph)

    def close(self) -> None:
        """Wait for the stream and release memory, stream and context."""
        self.activate()
        self.synchronize()
        for address in self._memory:
            self.driver.call("cuMemFree_v2", address)
        for memory in self._pinned:
            self.driver.call("cuMemFreeHost", memory.address)
        self.driver.call("cuStreamDestroy_v2", self.stream)
        self.driver.call("cuDevicePrimaryCtxRelease_v2", self._device)

"""The GPU of this machine through CUDA's driver: memory, events, and what the driver says of it; no package is needed.

Source of names and constants: CUDA driver API, cuda.h (https://docs.nvidia.com/cuda/cuda-driver-api/).
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
from collections.abc import Callable
from ctypes import byref, c_float, c_size_t, c_uint64
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DraftlineError
from draftline.sessions.tensorrt.cuda_driver import LIBRARY, CudaDriver, load_driver

WHERE = "gpu_check"
NUM_MULTIPROCESSORS, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS, L2_BYTES = 16, 36, 37, 38  # CU_DEVICE_ATTRIBUTE_...
TRANSFERS_PER_CLOCK = 2  # of double data rate memory
LEAST_FLUSHED_BYTES = 256 << 20
STREAM = 0


def open_gpu() -> Gpu:
    """Open the first GPU of this machine. Raises: DraftlineError where there is none, or no driver of it."""
    driver = load_driver()
    if driver is None:
        rule, cure = "this machine has an NVIDIA GPU and its driver", "run it on a machine with one"
        raise DraftlineError(WHERE, rule, f"no device of {LIBRARY}", cure)
    return Gpu(driver)


class Gpu:
    """The first GPU, its primary context current in the thread that opens it. All work is on the default stream."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._device = driver.device(0)
        driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", self._device))

    @property
    def architecture(self) -> int:
        return self.driver.architecture()

    @property
    def name(self) -> str:
        name = ctypes.create_string_buffer(256)
        self.driver.call("cuDeviceGetName", name, len(name), self._device)
        return name.value.decode()

    @property
    def cuda_version(self) -> str:
        """The newest CUDA that the driver serves."""
        version = self.driver.version()
        return f"{version // 1000}.{version % 1000 // 10}"

    @property
    def memory_bytes(self) -> int:
        size = c_size_t()
        self.driver.call("cuDeviceTotalMem_v2", byref(size), self._device)
        return size.value

    @property
    def memory_limit(self) -> float | None:
        """Bytes a second that memory clock and bus allow; None where the driver does not tell them."""
        bits = self.attribute(MEMORY_CLOCK_KHZ) * 1000 * TRANSFERS_PER_CLOCK * self.attribute(MEMORY_BUS_BITS)
        return bits / 8 or None

    def attribute(self, code: int) -> int:
        return self.driver.device_attribute(code, self._device)

    def allocate(self, num_bytes: int) -> int:
        address = c_uint64()
        self.driver.call("cuMemAlloc_v2", byref(address), max(1, num_bytes))
        return address.value

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.driver.call("cuMemFree_v2", address)

    def fill(self, address: int, byte: int, num_bytes: int) -> None:
        self.driver.call("cuMemsetD8Async", address, byte, num_bytes, STREAM)

    def upload(self, array: NDArray[Any], address: int | None = None) -> int:
        """Copy an array to ``address``, or to new memory; return the address."""
        array = np.ascontiguousarray(array)
        where = self.allocate(array.nbytes) if address is None else address
        if array.nbytes:
            self.driver.call("cuMemcpyHtoD_v2", where, array.ctypes.data, array.nbytes)
        return where

    def download(self, address: int, into: NDArray[Any]) -> None:
        """Copy from ``address`` into an array, after all work before."""
        self.synchronize()
        self.driver.call("cuMemcpyDtoH_v2", into.ctypes.data, address, into.nbytes)

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        self.driver.call("cuMemcpyDtoDAsync_v2", destination, source, num_bytes, STREAM)

    def synchronize(self) -> None:
        self.driver.call("cuCtxSynchronize")

    def measure_us(self, enqueue: Callable[[], None], num_calls: int, num_uncounted: int = 2) -> list[float]:
        """Measure calls of what ``enqueue`` puts on the stream, each after the cache was written over.

        The GPU is still writing while the host enqueues, so the host's time is not in the numbers.
        """
        num_bytes = max(LEAST_FLUSHED_BYTES, 4 * self.attribute(L2_BYTES))
        flushed = self.allocate(num_bytes)
        begin, end = (self.driver.handle("cuEventCreate", 0) for _ in range(2))
        times = []
        try:
            for number in range(num_uncounted + num_calls):
                self.fill(flushed, number % 2, num_bytes)
                self.driver.call("cuEventRecord", begin, STREAM)
                enqueue()
                self.driver.call("cuEventRecord", end, STREAM)
                self.driver.call("cuEventSynchronize", end)
                milliseconds = c_float()
                self.driver.call("cuEventElapsedTime", byref(milliseconds), begin, end)
                times.append(1000 * milliseconds.value)
        finally:
            for event in (begin, end):
                self.driver.call("cuEventDestroy_v2", event)
            self.free(flushed)
        return times[num_uncounted:]

    def median_us(self, enqueue: Callable[[], None], num_calls: int = 20) -> float:
        return statistics.median(self.measure_us(enqueue, num_calls))


def driver_release() -> str:
    """Return the release of the display driver, from the kernel or from ``nvidia-smi``."""
    module = Path("/sys/module/nvidia/version")
    if module.exists():
        return module.read_text(encoding="utf-8").strip()
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if answer.returncode == 0:
            return answer.stdout.splitlines()[0].strip()
    return "not told"

"""The few calls of CUDA's driver that launch our own kernels, through ctypes: no package is needed for them.

Source of names and constants: CUDA driver API, cuda.h (https://docs.nvidia.com/cuda/cuda-driver-api/).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from draftline.errors import DraftlineError

LIBRARY = "libcuda.so.1"
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_...
MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
FREE_SHARED_BYTES = 48 * 1024  # more must be asked for
C_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
}


class CudaDriver:
    """``library``: the loaded ``libcuda.so.1``. All calls work in the CUDA context of the calling thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("cuInit", 0)

    def num_devices(self) -> int:
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def architecture(self, device: int | None = None) -> int:
        """Return the compute capability of a device, of the context's unless given: 89 = 8.9."""
        handle = ctypes.c_int()
        if device is None:
            self.call("cuCtxGetDevice", ctypes.byref(handle))
        else:
            self.call("cuDeviceGet", ctypes.byref(handle), device)
        digits = [self._device_attribute(code, handle) for code in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)]
        return 10 * digits[0] + digits[1]

    def context(self) -> int:
        """Return the handle of the calling thread's context, 0 = none."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def load_function(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        """Load a cubin into the context and return the handle of its function ``entry``."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if shared_bytes > FREE_SHARED_BYTES:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        assert function.value is not None
        return function.value

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        num_threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[tuple[str, int | float]],
    ) -> None:
        """Launch ``function`` on ``stream``; ``arguments`` are pairs of a key of ``C_TYPES`` and a value."""
        values = [C_TYPES[kind](value) for kind, value in arguments]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        block = (num_threads, 1, 1)
        self.call(
            "cuLaunchKernel",
            ctypes.c_void_p(function),
            *grid,
            *block,
            shared_bytes,
            ctypes.c_void_p(stream),
            addresses,
            None,
        )

    def _device_attribute(self, code: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), code, device)
        return value.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library. Raises: DraftlineError where it fails."""
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            got = text.value.decode() if text.value else f"status {status}"
            raise DraftlineError("CUDA", f"{name} succeeds", got, "see the message of the driver, `nvidia-smi` first")


@functools.cache
def load_driver() -> CudaDriver | None:
    """Return the driver of this machine; None where there is none, or no GPU."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    try:
        driver = CudaDriver(library)
        return driver if driver.num_devices() else None
    except DraftlineError:  # a driver without a device says so in cuInit: CUDA_ERROR_NO_DEVICE
        return None

"""CUDA's driver through ctypes, no package is needed for it: the functions that anything here calls, and launches.

Source of names, types and constants: CUDA driver API, cuda.h (https://docs.nvidia.com/cuda/cuda-driver-api/).
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

_HANDLE, _ADDRESS, _SIZE, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_AS_IT_IS = None  # a reference, which has its type, or an integer of 32 bits
# Symbols of libcuda, whose names are not always those of the header, and the types of their arguments. A number given
# without its type would be passed in 32 bits.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_AS_IT_IS,),
    "cuDriverGetVersion": (_AS_IT_IS,),
    "cuDeviceGet": (_AS_IT_IS, _INT),
    "cuDeviceGetAttribute": (_AS_IT_IS, _AS_IT_IS, _INT),
    "cuDeviceGetCount": (_AS_IT_IS,),
    "cuDeviceGetName": (_AS_IT_IS, _AS_IT_IS, _INT),
    "cuDevicePrimaryCtxRetain": (_AS_IT_IS, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuDeviceTotalMem_v2": (_AS_IT_IS, _INT),
    "cuCtxGetCurrent": (_AS_IT_IS,),
    "cuCtxGetDevice": (_AS_IT_IS,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_AS_IT_IS, _AS_IT_IS),
    "cuMemAlloc_v2": (_AS_IT_IS, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemAllocHost_v2": (_AS_IT_IS, _SIZE),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemcpyHtoD_v2": (_ADDRESS, _HANDLE, _SIZE),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _HANDLE, _SIZE, _HANDLE),
    "cuMemcpyDtoH_v2": (_HANDLE, _ADDRESS, _SIZE),
    "cuMemcpyDtoHAsync_v2": (_HANDLE, _ADDRESS, _SIZE, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _HANDLE),
    "cuMemsetD8Async": (_ADDRESS, ctypes.c_uint, _SIZE, _HANDLE),
    "cuStreamCreate": (_AS_IT_IS, ctypes.c_uint),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamBeginCapture_v2": (_HANDLE, _INT),
    "cuStreamEndCapture": (_HANDLE, _AS_IT_IS),
    "cuGraphInstantiateWithFlags": (_AS_IT_IS, _HANDLE, ctypes.c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphDestroy": (_HANDLE,),
    "cuEventCreate": (_AS_IT_IS, _AS_IT_IS),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventElapsedTime": (_AS_IT_IS, _HANDLE, _HANDLE),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuModuleLoadData": (_AS_IT_IS, ctypes.c_char_p),
    "cuModuleGetFunction": (_AS_IT_IS, _HANDLE, _AS_IT_IS),
    "cuFuncSetAttribute": (_HANDLE, _AS_IT_IS, _AS_IT_IS),
    "cuLaunchKernel": (_HANDLE, *[_AS_IT_IS] * 7, _HANDLE, _AS_IT_IS, _AS_IT_IS),
}


class CudaDriver:
    """``library``: the loaded ``libcuda.so.1``. All calls work in the CUDA context of the calling thread."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("cuInit", 0)

    def num_devices(self) -> int:
        return self._integer("cuDeviceGetCount")

    def version(self) -> int:
        """Return the newest CUDA that the driver serves: 13000 = 13.0."""
        return self._integer("cuDriverGetVersion")

    def architecture(self, device: int | None = None) -> int:
        """Return the compute capability of a device, of the context's unless given: 89 = 8.9."""
        handle = self._integer("cuCtxGetDevice") if device is None else self.device(device)
        major, minor = (
            self.device_attribute(code, handle) for code in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR)
        )
        return 10 * major + minor

    def device(self, index: int) -> int:
        """Return the handle of a device."""
        return self._integer("cuDeviceGet", index)

    def device_attribute(self, code: int, device: int) -> int:
        """Return an attribute, one of CU_DEVICE_ATTRIBUTE_..., of the device with this handle."""
        return self._integer("cuDeviceGetAttribute", code, device)

    def context(self) -> int:
        """Return the handle of the calling thread's context, 0 = none."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def load_function(self, cubin: bytes, entry: str, shared_bytes: int) -> int:
        """Load a cubin into the context and return the handle of its function ``entry``."""
        module = self.handle("cuModuleLoadData", cubin)
        function = self.handle("cuModuleGetFunction", module, entry.encode())
        if shared_bytes > FREE_SHARED_BYTES:
            self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        return function

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
        self.call("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, addresses, None)

    def handle(self, name: str, *arguments: object) -> int:
        """Call a function that gives a pointer through its first argument; return the pointer."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        assert handle.value is not None
        return handle.value

    def _integer(self, name: str, *arguments: object) -> int:
        """Call a function that gives an int through its first argument; return it."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of ``FUNCTIONS`` with plain numbers. Raises: DraftlineError where it fails."""
        kinds = FUNCTIONS[name]
        typed = (value if kind is _AS_IT_IS else kind(value) for kind, value in zip(kinds, arguments, strict=True))
        status = getattr(self._library, name)(*typed)
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

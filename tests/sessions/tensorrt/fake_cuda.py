"""A libcuda on the host's memory: addresses are real, copies are made, and what the real one refuses is refused.

Work on a stream waits until somebody synchronises with it, as if the GPU were slow: a result that is read too early is
not there, and host memory that is written again too early is what the GPU gets.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype

# Symbols that libcuda.so exports for the calls of cuda.h (CUDA 13.0), as far as anything here calls them. The header's
# names without _v2 are other functions, of 32-bit addresses, or none.
SYMBOLS = frozenset(
    [
        "cuInit",
        "cuDeviceGet",
        "cuDeviceGetCount",
        "cuDeviceGetAttribute",
        "cuGetErrorName",
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuCtxGetDevice",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuMemGetInfo_v2",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemAllocHost_v2",
        "cuMemFreeHost",
        "cuMemcpyHtoD_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoDAsync_v2",
        "cuStreamCreate",
        "cuStreamSynchronize",
        "cuStreamDestroy_v2",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuGraphExecDestroy",
        "cuGraphDestroy",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncSetAttribute",
        "cuLaunchKernel",
    ]
)
ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    400: "CUDA_ERROR_INVALID_HANDLE",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    999: "CUDA_ERROR_UNKNOWN",
}
WITHOUT_CONTEXT = {"cuInit", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuGetErrorName"} | {
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2")
}
# Calls that wait, or that no graph can hold: refused while a stream of this thread is captured.
NOT_CAPTURED = {"cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuStreamSynchronize", "cuModuleLoadData"} | {
    *("cuMemAllocHost_v2", "cuMemFreeHost", "cuDevicePrimaryCtxRelease_v2", "cuStreamDestroy_v2")
}
CONTEXT, ALIGNMENT = 7, 256

Work = Callable[[], None]


class RefusedError(Exception):
    """A call fails with this status."""

    def __init__(self, status: int) -> None:
        super().__init__(ERRORS[status])
        self.status = status


@dataclass
class Stream:
    pending: list[Work] = field(default_factory=list)
    captured: list[Work] | None = None

    def add(self, work: Work) -> None:
        (self.pending if self.captured is None else self.captured).append(work)


class FakeCuda:
    """One GPU of ``total_bytes`` and compute capability ``architecture``; ``calls`` are the names of all calls."""

    def __init__(self, *, total_bytes: int = 1 << 28, architecture: int = 89) -> None:
        self.calls: list[str] = []
        self.launches: list[dict[str, Any]] = []
        self._architecture, self._total = architecture, total_bytes
        self._device: dict[int, NDArray[np.uint8]] = {}  # by address, whole allocations
        self._host: dict[int, NDArray[np.uint8]] = {}
        self._handles: dict[int, Any] = {}
        self._threads: dict[int, int] = {}
        self._num_retained = 0

    def __getattr__(self, name: str) -> Any:
        if name not in SYMBOLS:
            raise AttributeError(f"undefined symbol: {name}")

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            try:
                if name not in WITHOUT_CONTEXT and self._threads.get(threading.get_ident()) != CONTEXT:
                    raise RefusedError(201)
                if name in NOT_CAPTURED and self.is_capturing:
                    raise RefusedError(900)
                getattr(self, f"_{name}")(*arguments)
            except RefusedError as refused:
                return refused.status
            return 0

        return call

    # What tests ask

    @property
    def is_capturing(self) -> bool:
        return any(isinstance(own, Stream) and own.captured is not None for own in self._handles.values())

    @property
    def used_bytes(self) -> int:
        return sum(own.size for own in self._device.values())

    @property
    def is_empty(self) -> bool:
        """Whether everything was released."""
        return not self._device and not self._host and not self._handles and not self._num_retained

    def device(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return device memory, which must lie in one allocation. Raises: RefusedError."""
        return _inside(self._device, address, num_bytes)

    def stream(self, handle: int) -> Stream:
        own = self._handles.get(handle)
        if not isinstance(own, Stream):
            raise RefusedError(400)
        return own

    # Devices and contexts

    def _cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = 1

    def _cuDeviceGet(self, device: Any, index: Any) -> None:  # noqa: N802
        assert _plain(index) == 0
        device._obj.value = 0

    def _cuDeviceGetAttribute(self, value: Any, code: int, device: Any) -> None:  # noqa: N802
        value._obj.value = dict(zip((75, 76), divmod(self._architecture, 10), strict=True))[code]

    def _cuGetErrorName(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = ERRORS[status].encode()

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:  # noqa: N802
        self._num_retained += 1
        context._obj.value = CONTEXT

    def _cuDevicePrimaryCtxRelease_v2(self, device: Any) -> None:  # noqa: N802
        self._num_retained -= 1

    def _cuCtxSetCurrent(self, context: Any) -> None:  # noqa: N802
        self._threads[threading.get_ident()] = context.value

    def _cuCtxGetCurrent(self, context: Any) -> None:  # noqa: N802
        context._obj.value = self._threads.get(threading.get_ident(), 0)

    def _cuCtxGetDevice(self, device: Any) -> None:  # noqa: N802
        device._obj.value = 0

    # Memory

    def _cuMemGetInfo_v2(self, free: Any, total: Any) -> None:  # noqa: N802
        free._obj.value, total._obj.value = self._total - self.used_bytes, self._total

    def _cuMemAlloc_v2(self, address: Any, size: Any) -> None:  # noqa: N802
        assert isinstance(address._obj, ctypes.c_uint64)
        assert isinstance(size, ctypes.c_size_t)
        if self.used_bytes + size.value > self._total:
            raise RefusedError(2)
        address._obj.value = _allocate(self._device, size.value)

    def _cuMemFree_v2(self, address: Any) -> None:  # noqa: N802
        self._all_done()  # the real one waits
        if self._device.pop(address.value, None) is None:
            raise RefusedError(1)

    def _cuMemAllocHost_v2(self, address: Any, size: Any) -> None:  # noqa: N802
        address._obj.value = _allocate(self._host, size.value)

    def _cuMemFreeHost(self, address: Any) -> None:  # noqa: N802
        if self._host.pop(address.value, None) is None:
            raise RefusedError(1)

    def _cuMemcpyHtoD_v2(self, destination: Any, source: Any, size: Any) -> None:  # noqa: N802
        self._refuse_device(source.value)
        self.device(destination.value, size.value)[:] = _host_bytes(source.value, size.value)

    def _cuMemcpyHtoDAsync_v2(self, destination: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        self._copy(self.device, destination, self._pinned, source, size, stream)

    def _cuMemcpyDtoHAsync_v2(self, destination: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        self._copy(self._pinned, destination, self.device, source, size, stream)

    def _cuMemcpyDtoDAsync_v2(self, destination: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        self._copy(self.device, destination, self.device, source, size, stream)

    def _copy(self, to: Any, destination: Any, of: Any, source: Any, size: Any, stream: Any) -> None:
        first, last, count = destination.value, source.value, size.value
        to(first, count), of(last, count)  # refused now, or later when it was freed in between

        def work() -> None:
            to(first, count)[:] = of(last, count)

        self.stream(stream.value).add(work)

    def _pinned(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        self._refuse_device(address)
        return _inside(self._host, address, num_bytes)

    def _refuse_device(self, address: int) -> None:
        """Refuse device memory in the place of the host's."""
        if any(first <= address < first + own.size for first, own in self._device.items()):
            raise RefusedError(1)

    # Streams and graphs

    def _cuStreamCreate(self, stream: Any, flags: Any) -> None:  # noqa: N802
        stream._obj.value = self._keep(Stream())

    def _cuStreamDestroy_v2(self, stream: Any) -> None:  # noqa: N802
        self.stream(stream.value)
        del self._handles[stream.value]

    def _cuStreamSynchronize(self, stream: Any) -> None:  # noqa: N802
        own = self.stream(stream.value)
        while own.pending:
            own.pending.pop(0)()

    def _all_done(self) -> None:
        for own in self._handles.values():
            if isinstance(own, Stream):
                while own.pending:
                    own.pending.pop(0)()

    def _cuStreamBeginCapture_v2(self, stream: Any, mode: Any) -> None:  # noqa: N802
        assert _plain(mode) in (0, 1, 2)
        self.stream(stream.value).captured = []

    def _cuStreamEndCapture(self, stream: Any, graph: Any) -> None:  # noqa: N802
        own = self.stream(stream.value)
        if own.captured is None:
            raise RefusedError(901)
        graph._obj.value = self._keep(own.captured)
        own.captured = None

    def _cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> None:  # noqa: N802
        assert _plain(flags) == 0
        executable._obj.value = self._keep(tuple(self._graph(graph.value, list)))

    def _cuGraphLaunch(self, executable: Any, stream: Any) -> None:  # noqa: N802
        for work in self._graph(executable.value, tuple):
            self.stream(stream.value).add(work)

    def _cuGraphExecDestroy(self, executable: Any) -> None:  # noqa: N802
        self._graph(executable.value, tuple)
        del self._handles[executable.value]

    def _cuGraphDestroy(self, graph: Any) -> None:  # noqa: N802
        self._graph(graph.value, list)
        del self._handles[graph.value]

    def _graph(self, handle: int, kind: type) -> Any:
        if not isinstance(self._handles.get(handle), kind):
            raise RefusedError(400)
        return self._handles[handle]

    def _keep(self, own: Any) -> int:
        handle = 0x1000 + 16 * len(self.calls)  # another in every call
        self._handles[handle] = own
        return handle

    # Kernels: the code that ``fake_kernels`` gives out says which it is

    def _cuModuleLoadData(self, module: Any, image: Any) -> None:  # noqa: N802
        module._obj.value = 0x10 + 2 * len(self.calls)
        self._modules = {**getattr(self, "_modules", {}), module._obj.value: json.loads(image.value)}

    def _cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> None:  # noqa: N802
        code = self._modules[module.value]
        assert entry.decode() == f"{code['kernel']}_entry"
        assert code["architecture"] == self._architecture
        function._obj.value = module.value + 1

    def _cuFuncSetAttribute(self, function: Any, code: int, value: int) -> None:  # noqa: N802
        assert code == 8

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> None:  # noqa: N802
        grid, block, (_, stream, parameters, extra) = rest[:3], rest[3:6], rest[6:]
        assert extra is None
        assert block[1:] == (1, 1)
        code = self._modules[function.value - 1]
        assert code["kernel"] == "commit_rows", "attention is part of the engine"
        names = ("kv_rows", "rows", "slots", "kv_pools", "scales", "layer_stride", "global_scratch", "profile_scratch")
        values = dict(zip(names, (ctypes.c_uint64.from_address(at).value for at in parameters), strict=False))
        assert all(values[name] % 16 == 0 for name in names if name != "layer_stride"), "pointers are aligned"
        self.launches.append({"grid": grid, **values})
        self.stream(stream.value).add(lambda: self._commit_rows(code["shape"], grid, values))

    def _commit_rows(self, shape: dict[str, Any], grid: tuple[int, ...], given: dict[str, int]) -> None:
        """As ``plugins/tree_attention/gpu/commit.py``: a float8 pool has numbers divided by a scale of each plane."""
        num_rows, num_planes, _ = grid
        dtype, is_float8 = numpy_dtype(shape["kv_dtype"]), shape["kv_dtype"] == "float8_e4m3fn"
        row_dtype = numpy_dtype(shape["dtype"]) if is_float8 else dtype
        heads, size, block = shape["num_kv_heads"], shape["head_size"], shape["block_size"]
        rows, slots = (self.device(given[name], 8 * num_rows).view(np.int64) for name in ("rows", "slots"))
        row_bytes = num_planes * heads * size * row_dtype.itemsize
        scales = np.ones(num_planes, np.float32)
        if is_float8:
            scales = self.device(given["scales"], 4 * num_planes).view(np.float32)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            if slot < 0:
                continue
            stored = self.device(given["kv_rows"] + row * row_bytes, row_bytes).view(row_dtype)
            planes = stored.reshape(num_planes, heads, size)
            for plane in range(num_planes):
                values = planes[plane]
                if is_float8:
                    values = np.clip(values.astype(np.float32) / scales[plane], -448, 448)
                for head in range(heads):
                    head_row = ((slot // block * 2 + plane % 2) * heads + head) * block + slot % block
                    element = plane // 2 * given["layer_stride"] + head_row * size
                    at = given["kv_pools"] + element * dtype.itemsize
                    self.device(at, size * dtype.itemsize).view(dtype)[:] = values[head].astype(dtype)


def _plain(value: Any) -> int:
    return int(getattr(value, "value", value))


def _allocate(memory: dict[int, NDArray[np.uint8]], num_bytes: int) -> int:
    """Add aligned memory full of NaN, with room around it that belongs to nobody."""
    if num_bytes < 1:
        raise RefusedError(1)
    whole = np.full(num_bytes + 3 * ALIGNMENT, 0xFF, np.uint8)
    first = -whole.ctypes.data % ALIGNMENT + ALIGNMENT
    memory[whole.ctypes.data + first] = whole[first : first + num_bytes]
    return int(whole.ctypes.data) + first


def _inside(memory: dict[int, NDArray[np.uint8]], address: int, num_bytes: int) -> NDArray[np.uint8]:
    for first, own in memory.items():
        if first <= address and address + num_bytes <= first + own.size:
            return own[address - first : address - first + num_bytes]
    raise RefusedError(700)


def _host_bytes(address: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

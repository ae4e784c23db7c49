"""A libcuda on host memory whose kernels are the oracle; they read and write what their raw arguments say."""

from __future__ import annotations

import ctypes
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.arguments import ARGUMENT_TYPES, SIGNATURES
from draftline.kernels.cases import NUMPY_DTYPES
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.compiler import SCRATCH
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.oracle import round_as_pool, tree_attention
from draftline.sessions.tensorrt.cuda_driver import C_TYPES

ATTRIBUTES = {75: 8, 76: 9, 16: 58, 36: 6_251_000, 37: 192, 38: 48 << 20}  # of an L4, by CU_DEVICE_ATTRIBUTE_...
KERNELS = ("tree_attention", "tree_attention_reduce", "commit_rows")


def kernel_types(name: str) -> dict[str, str]:
    """Return each argument with its kind, as the compiler gives them."""
    kinds = {argument: ARGUMENT_TYPES.get(kind, "pointer") for argument, kind in SIGNATURES[name].items()}
    return kinds | dict.fromkeys(SCRATCH, "pointer")


def fake_compile(
    shape: KernelShape, architectures: Any, cache: Path | None = None, configuration: KernelConfiguration | None = None
) -> tuple[CompiledKernel, ...]:
    """Stand in for ``compile_kernels``: code that ``FakeLibrary`` knows."""
    (architecture,) = architectures
    return tuple(
        CompiledKernel(
            name=name,
            architecture=architecture,
            entry=name,
            cubin=json.dumps({"name": name, "shape": asdict(shape)}).encode(),
            ptx="",
            shared_bytes=64 << 10,
            num_warps=4,
            num_registers=128,
            spill_bytes=0,
            arguments=tuple(kernel_types(name)),
            argument_types=tuple(kernel_types(name).values()),
            configuration=configuration or default_configuration(shape, architecture),
        )
        for name in KERNELS
    )


class FakeLibrary:
    """``wrong``: what the attention kernel adds to its first number. Every call of a name that is not here fails."""

    def __init__(self, *, wrong: float = 0.0) -> None:
        self.wrong = wrong
        self.launched: list[str] = []
        self._memory: dict[int, Any] = {}
        self._functions: list[dict[str, Any]] = []
        self._clock = 0.0

    @property
    def num_allocations(self) -> int:
        return len(self._memory)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    cuCtxGetDevice = cuCtxSetCurrent = cuCtxSynchronize = lambda self, *rest: 0  # noqa: N815

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 0
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        context._obj.value = 7
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 7
        return 0

    def cuDeviceGetAttribute(self, value: Any, code: int, device: Any) -> int:  # noqa: N802
        value._obj.value = ATTRIBUTES[code]
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"A fake L4"
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13000
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:  # noqa: N802
        size._obj.value = 24 << 30
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_ILLEGAL_ADDRESS"
        return 0

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:  # noqa: N802
        buffer = ctypes.create_string_buffer(size.value)
        self._memory[ctypes.addressof(buffer)] = buffer
        address._obj.value = ctypes.addressof(buffer)
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:  # noqa: N802
        del self._memory[address.value]
        return 0

    def cuMemcpyHtoD_v2(self, destination: Any, source: Any, size: Any) -> int:  # noqa: N802
        return self._copy(destination.value, source.value, size.value)

    def cuMemcpyDtoH_v2(self, destination: Any, source: Any, size: Any) -> int:  # noqa: N802
        return self._copy(destination.value, source.value, size.value)

    def cuMemcpyDtoDAsync_v2(self, destination: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        self._clock += size.value / 100e3  # ms at 100 MB/s
        return 0

    def cuMemsetD8Async(self, address: Any, byte: Any, size: Any, stream: Any) -> int:  # noqa: N802
        if size.value <= 1 << 24:  # more only flushes the cache
            ctypes.memset(address.value, byte.value, size.value)
        return 0

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        self._functions.append({"clock": 0.0})
        event._obj.value = len(self._functions)
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self._functions[event.value - 1]["clock"] = self._clock
        return 0

    cuEventSynchronize = cuEventDestroy_v2 = lambda self, event: 0  # noqa: N815

    def cuEventElapsedTime(self, milliseconds: Any, begin: Any, end: Any) -> int:  # noqa: N802
        clocks = (self._functions[event.value - 1]["clock"] for event in (end, begin))
        milliseconds._obj.value = next(clocks) - next(clocks)
        return 0

    def cuModuleLoadData(self, module: Any, image: ctypes.c_char_p) -> int:  # noqa: N802
        assert image.value is not None
        self._functions.append(json.loads(image.value))
        module._obj.value = len(self._functions)
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> int:  # noqa: N802
        assert self._functions[module.value - 1]["name"] == entry.decode()
        function._obj.value = module.value
        return 0

    def cuFuncSetAttribute(self, function: Any, code: int, value: int) -> int:  # noqa: N802
        return 0

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:  # noqa: N802
        kernel = self._functions[function.value - 1]
        name, shape, parameters = kernel["name"], KernelShape(**kernel["shape"]), rest[8]
        self.launched.append(name)
        self._clock += 0.5
        kinds = kernel_types(name).items()
        values = {
            argument: C_TYPES[kind].from_address(parameters[index]).value
            for index, (argument, kind) in enumerate(kinds)
        }
        if name == "tree_attention":
            self._attend(shape, values)
        elif name == "commit_rows":
            self._commit(shape, values, rest[:3])
        return 0

    def _copy(self, destination: int, source: int, size: int) -> int:
        ctypes.memmove(destination, source, size)
        return 0

    def _array(self, address: int, dtype: Any, *shape: int) -> NDArray[Any]:
        """Return memory as an array; a size of -1 is what the allocation has."""
        buffer = self._memory[address]
        if -1 in shape:
            row = int(np.prod([size for size in shape if size != -1])) * np.dtype(dtype).itemsize
            shape = tuple(len(buffer) // row if size == -1 else size for size in shape)
        count = int(np.prod(shape))
        return np.frombuffer(buffer, np.dtype(dtype), count).reshape(shape)

    def _attend(self, shape: KernelShape, values: dict[str, Any]) -> None:
        dtype, heads, kv_heads, size = NUMPY_DTYPES[shape.dtype], shape.num_heads, shape.num_kv_heads, shape.head_size
        tokens, sequences = values["num_tokens"], values["num_sequences"]
        wide = {
            name: self._array(values[name], dtype, tokens, own, size).astype(np.float32)
            for name, own in (("q", heads), ("k_new", kv_heads), ("v_new", kv_heads))
        }
        pool = self._array(values["kv_pool"], NUMPY_DTYPES[shape.kv_dtype], -1, 2, kv_heads, shape.block_size, size)
        out = tree_attention(
            **wide,
            kv_pool=pool,
            block_table=self._array(values["block_table"], np.int32, sequences, values["max_blocks"]),
            context_lengths=self._array(values["context_lengths"], np.int32, sequences),
            sequence_starts=self._array(values["sequence_starts"], np.int32, sequences + 1),
            packed_mask=self._array(values["packed_mask"], np.int32, tokens, values["mask_words"]),
            sinks=self._array(values["sinks"], np.float32, heads) if shape.has_sinks else None,
            scale=values["scale"],
            window=shape.window,
            softcap=shape.softcap,
            key_scale=values["key_scale"],
            value_scale=values["value_scale"],
        )
        out[0, 0] += self.wrong
        self._array(values["out"], dtype, tokens, heads * size)[:] = out

    def _commit(self, shape: KernelShape, values: dict[str, Any], grid: tuple[int, ...]) -> None:
        count, layers = grid[0], grid[1] // 2
        heads, size, is_float8 = shape.num_kv_heads, shape.head_size, shape.kv_dtype == "float8_e4m3fn"
        row_dtype = NUMPY_DTYPES[shape.dtype if is_float8 else shape.kv_dtype]
        kv_rows = self._array(values["kv_rows"], row_dtype, -1, grid[1] * heads, size)
        pools = self._array(
            values["kv_pools"], NUMPY_DTYPES[shape.kv_dtype], layers, -1, 2, heads, shape.block_size, size
        )
        assert values["layer_stride"] == pools[0].size
        scales = self._array(values["scales"], np.float32, layers, 2)
        rows, slots = (self._array(values[name], np.int64, count) for name in ("rows", "slots"))
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            for plane in range(2 * layers if slot >= 0 else 0):
                scale = scales[plane // 2, plane % 2]
                own = kv_rows[row, heads * plane : heads * (plane + 1)].astype(np.float32)
                stored = round_as_pool(own, pools.dtype, float(scale)) / scale
                pools[plane // 2, slot // shape.block_size, plane % 2, :, slot % shape.block_size] = stored

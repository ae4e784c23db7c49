"""What a call of the plugin asks of CUDA's driver, of which a fake stands in."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest

from draftline.errors import ArtifactError, DraftlineError
from draftline.kernels.configurations import default_configuration
from draftline.kernels.launches import attention_launches, num_sections
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt import plugin_launch
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from draftline.sessions.tensorrt.plugin_kernels import POINTERS, PluginKernels
from draftline.sessions.tensorrt.plugin_launch import AttentionCall, launch_attention, run_attention
from tests.sessions.tensorrt.plans import fake_kernels

SHAPE = KernelShape(8, 2, 64, 16)
CONFIGURATION = default_configuration(SHAPE, 89)
MAJOR, MINOR = 75, 76


class FakeCuda:
    """The functions of libcuda that are called: a GPU of compute capability 8.9, context 1."""

    def __init__(self, *, failing: str = "") -> None:
        self.calls: list[str] = []
        self.loaded: list[bytes] = []
        self.entries: list[str] = []
        self.shared: list[int] = []
        self.launches: list[dict[str, Any]] = []
        self._failing = failing

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == self._failing:
                return 999
            return getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuInit(self, flags: int) -> None:  # noqa: N802
        assert flags == 0

    def _cuCtxGetCurrent(self, context: Any) -> None:  # noqa: N802
        context._obj.value = 1

    def _cuCtxGetDevice(self, device: Any) -> None:  # noqa: N802
        device._obj.value = 0

    def _cuDeviceGetAttribute(self, value: Any, code: int, device: Any) -> None:  # noqa: N802
        value._obj.value = {MAJOR: 8, MINOR: 9}[code]

    def _cuModuleLoadData(self, module: Any, image: Any) -> None:  # noqa: N802
        self.loaded.append(image.value)
        module._obj.value = 100 + len(self.loaded)

    def _cuModuleGetFunction(self, function: Any, module: Any, entry: bytes) -> None:  # noqa: N802
        self.entries.append(entry.decode())
        function._obj.value = module.value + 1000

    def _cuFuncSetAttribute(self, function: Any, code: int, value: int) -> None:  # noqa: N802
        assert code == 8
        self.shared.append(value)

    def _cuLaunchKernel(self, function: Any, *rest: Any) -> None:  # noqa: N802
        grid, block, (shared, stream, parameters, extra) = rest[:3], rest[3:6], rest[6:]
        assert extra is None
        self.launches.append(
            {"function": function.value, "grid": grid, "block": block, "shared": shared, "stream": stream.value}
            | {"parameters": parameters}
        )

    def _cuGetErrorName(self, status: int, text: Any) -> None:  # noqa: N802
        text._obj.value = f"CUDA_ERROR_{status}".encode()


def make_call(kernels: PluginKernels, max_blocks: int) -> AttentionCall:
    pointers = {name: 0x1000 * (index + 1) for index, name in enumerate(POINTERS)}
    return AttentionCall(kernels, pointers, 33, 3, max_blocks, 2, 0.125, stream=77)


def test_scales_of_a_float8_pool_reach_the_kernels() -> None:
    call = replace(make_call(fake_kernels(SHAPE), 4), key_scale=0.25, value_scale=8.0)
    arguments = call.arguments(CONFIGURATION)
    assert (arguments["scale"], arguments["key_scale"], arguments["value_scale"]) == (0.125, 0.25, 8.0)


def read(address: int, kind: Any) -> Any:
    return kind.from_address(address).value


@pytest.mark.parametrize("max_blocks", [4, 400])
def test_a_call_launches_what_the_kernels_say(max_blocks: int) -> None:
    cuda, kernels = FakeCuda(), fake_kernels(SHAPE, (80, 89, 120))
    driver = CudaDriver(cuda)
    values: list[list[Any]] = []
    launch = driver.launch

    def record(function: int, grid: Any, threads: int, shared: int, stream: int, arguments: Any) -> None:
        values.append(list(arguments))
        launch(function, grid, threads, shared, stream, arguments)

    driver.launch = record  # type: ignore[method-assign]
    call = make_call(kernels, max_blocks)
    launch_attention(driver, call)
    expected = attention_launches(SHAPE, CONFIGURATION, 33, 3, max_blocks)
    assert [launch["grid"] for launch in cuda.launches] == [launch.grid for launch in expected]
    assert cuda.entries == [f"{launch.kernel}_entry" for launch in expected]
    assert all(b"sm_89" in image for image in cuda.loaded)
    assert {(item["block"], item["shared"], item["stream"]) for item in cuda.launches} == {((128, 1, 1), 65536, 77)}
    sections = num_sections(SHAPE, CONFIGURATION, max_blocks)
    assert values[0] == [
        ("pointer", call.pointers["q"]),
        ("pointer", call.pointers["k_new"]),
        ("pointer", call.pointers["out"]),
        ("pointer", call.pointers["workspace"]),
        ("float32", 0.125),
        ("int32", 33),
        ("int32", sections),
        ("pointer", 0),
    ]
    assert len(expected) == (1 if sections == 1 else 2)


def test_functions_are_loaded_once() -> None:
    cuda, kernels = FakeCuda(), fake_kernels(SHAPE, (89,))
    driver = CudaDriver(cuda)
    for _ in range(3):
        launch_attention(driver, make_call(kernels, 400))
    assert len(cuda.launches) == 6
    assert cuda.entries == ["tree_attention_entry", "tree_attention_reduce_entry"]
    assert cuda.shared == [65536, 65536], "more than 48 KiB must be asked for"


def test_parameters_are_addresses_of_values() -> None:
    cuda = FakeCuda()
    seen: list[Any] = []

    def look(function: Any, *rest: Any) -> None:
        addresses = rest[8]
        seen.extend([read(addresses[0], ctypes.c_uint64), read(addresses[1], ctypes.c_int32)])
        seen.append(read(addresses[2], ctypes.c_float))

    cuda._cuLaunchKernel = look  # type: ignore[method-assign]
    arguments = [("pointer", 0x7F0012345678), ("int32", -5), ("float32", 0.5)]
    CudaDriver(cuda).launch(5, (1, 2, 3), 64, 0, 0, arguments)
    assert seen == [0x7F0012345678, -5, 0.5]


@pytest.mark.parametrize("failing", ["cuModuleLoadData", "cuLaunchKernel", "cuCtxGetDevice"])
def test_a_failure_of_the_driver_is_named(failing: str) -> None:
    driver = CudaDriver(FakeCuda(failing=failing))
    with pytest.raises(DraftlineError, match=f"CUDA: {failing} succeeds; got CUDA_ERROR_999; "):
        launch_attention(driver, make_call(fake_kernels(replace(SHAPE)), 4))


def test_without_a_gpu_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_launch, "load_driver", lambda: None)
    with pytest.raises(ArtifactError, match="plugin TreeAttention: runs on a GPU; got none; "):
        run_attention(make_call(fake_kernels(SHAPE), 4))

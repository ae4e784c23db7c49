"""The fakes are what they stand for: names and parameters of the real module, and what the real ones refuse."""

from __future__ import annotations

import inspect
import re
import threading
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx

from draftline.errors import DraftlineError
from draftline.sessions.tensorrt.cuda_device import CudaDevice, Rows
from draftline.sessions.tensorrt.cuda_driver import FUNCTIONS, CudaDriver
from tests.bench.gpu.fake_gpu import FakeLibrary
from tests.sessions.tensorrt import fake_cuda
from tests.sessions.tensorrt.fake_cuda import SYMBOLS, FakeCuda
from tests.sessions.tensorrt.fake_vendor import FakeContext, FakeEngine, FakeRuntime, FakeRuntimeConfig

REAL: dict[type, Any] = {
    FakeRuntime: tensorrt_rtx.Runtime,
    FakeEngine: tensorrt_rtx.ICudaEngine,
    FakeContext: tensorrt_rtx.IExecutionContext,
    FakeRuntimeConfig: tensorrt_rtx.IRuntimeConfig,
}
OURS = {"type_of", "sizes_of", "numpy_type"}  # of the fakes alone


@pytest.mark.parametrize("fake", REAL, ids=lambda fake: fake.__name__)
def test_methods_are_the_real_ones(fake: type) -> None:
    real = REAL[fake]
    for name, member in vars(fake).items():
        if name.startswith("_") or name in OURS or name == "module":
            continue
        assert hasattr(real, name), f"{real.__name__} has no {name}"
        if isinstance(member, property):
            assert isinstance(getattr(real, name), property)
            continue
        parameters = [each for each in inspect.signature(member).parameters if each != "self"]
        signatures = re.findall(rf"{name}\(([^)]*)\)", getattr(real, name).__doc__)
        known = [re.findall(r"(?:^|, )(\w+): ", signature) for signature in signatures]
        assert any(own[1:] == parameters for own in known), f"{name}{parameters} is none of {known}"


def test_what_we_call_is_in_the_library() -> None:
    implemented = {name[1:] for name in vars(FakeCuda) if name.startswith("_cu")}
    assert implemented == SYMBOLS
    of_the_check = {name for name in vars(FakeLibrary) if name.startswith("cu")}
    assert {*FUNCTIONS, "cuGetErrorName"} == SYMBOLS | of_the_check


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(total_bytes=1 << 20)


@pytest.fixture
def device(cuda: FakeCuda) -> CudaDevice:
    return CudaDevice(CudaDriver(cuda))


def refused(device: CudaDevice, name: str, *arguments: Any) -> str:
    """Make a call that fails; return the name of its status."""
    with pytest.raises(DraftlineError, match=f"CUDA: {name} succeeds; got ") as caught:
        device.driver.call(name, *arguments)
    return str(caught.value).split("got ")[1].split(";")[0]


def test_what_is_copied_arrives_when_the_stream_is_done(cuda: FakeCuda, device: CudaDevice) -> None:
    memory, staged, back = device.allocate("it", 64), device.allocate_pinned(64), device.allocate_pinned(64)
    staged.bytes[:] = np.arange(64)
    device.copy_in(memory, staged, 64)
    device.copy_out(back.address, memory, 64)
    assert back.bytes[5] == 0xFF, "not yet"
    device.synchronize()
    np.testing.assert_array_equal(back.bytes, np.arange(64))
    device.copy_in(memory, staged, 64)
    device.wait_for(staged)
    staged.bytes[:] = 0
    assert cuda.device(memory, 64)[5] == 5, "what was written later came later"
    device.close()
    assert cuda.is_empty


@pytest.mark.parametrize(
    ("rows", "places", "num_copies"), [([3, 4, 5, 1], [0, 1, 2, 3], 2), ([1, 1], [0, 1], 2), ([], [], 0), ([2], [0], 1)]
)
def test_rows_that_follow_each_other_are_one_copy(
    cuda: FakeCuda, device: CudaDevice, rows: list[int], places: list[int], num_copies: int
) -> None:
    source, destination = device.allocate("source", 64), device.allocate("destination", 64)
    device.upload(source, np.arange(64, dtype=np.uint8))
    device.copy_rows(Rows(destination, 8), np.array(places, int), Rows(source, 8), np.array(rows, int))
    device.synchronize()
    for row, place in zip(rows, places, strict=True):
        assert cuda.device(destination + 8 * place, 8).tolist() == list(range(8 * row, 8 * row + 8))
    assert cuda.calls.count("cuMemcpyDtoDAsync_v2") == num_copies
    device.copy_rows(Rows(destination, 2), np.array([1]), Rows(source, 8), np.array([2]), first_byte=3)
    device.synchronize()
    assert cuda.device(destination + 2, 2).tolist() == [19, 20]


def test_memory_is_asked_of_whom_it_is(cuda: FakeCuda, device: CudaDevice) -> None:
    memory, pinned = device.allocate("it", 512), device.allocate_pinned(512)
    elsewhere = np.zeros(512, np.uint8)
    for size, address in ((513, memory), (8, memory + 508), (8, memory - 8)):
        assert refused(device, "cuMemcpyHtoDAsync_v2", address, pinned.address, size, device.stream).endswith("ADDRESS")
    for source in (elsewhere.ctypes.data, memory):
        refused(device, "cuMemcpyHtoDAsync_v2", memory, source, 8, device.stream)
    for destination in (elsewhere.ctypes.data, memory):
        refused(device, "cuMemcpyDtoHAsync_v2", destination, memory, 8, device.stream)
    refused(device, "cuMemcpyDtoDAsync_v2", memory, pinned.address, 8, device.stream)
    device.driver.call("cuMemFree_v2", memory)
    assert refused(device, "cuMemcpyDtoHAsync_v2", pinned.address, memory, 8, device.stream).endswith("ADDRESS")
    assert refused(device, "cuMemFree_v2", memory).endswith("VALUE")
    with pytest.raises(
        DraftlineError, match=r"engine: weights fits in .* 1,048,576 bytes are free; got 2,000,000 bytes"
    ):
        device.allocate("weights", 2_000_000)


def test_a_capture_records_and_waits_for_nobody(cuda: FakeCuda, device: CudaDevice) -> None:
    memory, pinned = device.allocate("it", 256), device.allocate_pinned(256)
    pinned.bytes[:] = 1
    graph = device.capture(lambda: device.copy_in(memory, pinned, 256))
    device.synchronize()
    assert cuda.device(memory, 1)[0] == 0xFF, "captured, not run"
    pinned.bytes[:] = 2
    device.launch(graph)
    device.synchronize()
    assert cuda.device(memory, 1)[0] == 2, "replayed with what is there now"
    for wait in (device.synchronize, lambda: device.allocate("more", 8), lambda: device.upload(memory, pinned.bytes)):
        with pytest.raises(DraftlineError, match="STREAM_CAPTURE_UNSUPPORTED"):
            device.capture(wait)
        assert not cuda.is_capturing, "a failed capture ends too"
    device.destroy_graph(graph)
    assert refused(device, "cuGraphLaunch", graph, device.stream).endswith("HANDLE")


def test_a_thread_needs_the_context(cuda: FakeCuda, device: CudaDevice) -> None:
    failures: list[Exception] = []

    def work(activates: bool) -> None:
        try:
            if activates:
                device.activate()
            device.free_bytes()
        except DraftlineError as error:
            failures.append(error)

    for activates in (False, True):
        thread = threading.Thread(target=work, args=(activates,))
        thread.start()
        thread.join()
    assert len(failures) == 1
    assert "INVALID_CONTEXT" in str(failures[0])


def test_an_unknown_symbol_is_one() -> None:
    with pytest.raises(AttributeError, match="undefined symbol: cuMemAlloc"):
        fake_cuda.FakeCuda().cuMemAlloc  # noqa: B018

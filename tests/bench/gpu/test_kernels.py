"""The parts that launch kernels, on a fake driver whose kernels are the oracle."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.bench.gpu import attention_step, bandwidth, configurations, kernels
from draftline.bench.gpu.device import Gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.errors import BuildError
from draftline.kernels.cases import make_case
from draftline.kernels.commit_cases import count_wrong, make_commit_case
from draftline.kernels.counted import needed_bytes
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from draftline.sessions.tensorrt.plugin_kernels import ATTENTION_KERNELS, PluginKernels
from tests.bench.gpu.fake_gpu import FakeLibrary, fake_compile


def compile_here(jobs: Any) -> Any:
    """Stand in for ``compile_ahead``: no processes."""
    for name, compile_one in jobs:
        yield name, compile_one()


def fake_part(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> None:
    for module in (kernels, bandwidth, configurations):
        monkeypatch.setattr(module, "open_gpu", lambda: Gpu(CudaDriver(library)))
    monkeypatch.setattr(kernels, "compile_kernels", fake_compile)
    monkeypatch.setattr(configurations, "compile_kernels", fake_compile)
    monkeypatch.setattr(kernels, "compile_ahead", compile_here)
    monkeypatch.setattr(configurations, "compile_ahead", compile_here)

    def compile_plugin(shape: KernelShape, architectures: Any, cache: Path) -> PluginKernels:
        compiled = fake_compile(shape, architectures)
        return PluginKernels(shape, tuple(kernel for kernel in compiled if kernel.name in ATTENTION_KERNELS))

    monkeypatch.setattr(bandwidth, "compile_plugin_kernels", compile_plugin)


def run_part(part: Any, tmp_path: Path, seconds: float = 60) -> list[Finding]:
    told: list[Finding] = []
    part(PartCall(tmp_path, time.monotonic() + seconds, told.append))
    return told


def test_kernels_that_are_right_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = FakeLibrary()
    fake_part(monkeypatch, library)
    monkeypatch.setattr(kernels, "NUM_CASES", 14)
    told = run_part(kernels.check_kernels, tmp_path)
    *kinds, total = told
    assert total.value == 28
    assert all(finding.agrees for finding in kinds)
    assert {finding.what for finding in kinds} >= {
        "float16, float16 pool, default configuration",
        "bfloat16, float8_e4m3fn pool, case's configuration",
    }
    assert library.launched.count("tree_attention") == 28
    assert library.launched.count("tree_attention_reduce") > 0
    assert library.num_allocations == 0


def test_a_wrong_number_is_found_and_its_case_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_part(monkeypatch, FakeLibrary(wrong=0.5))
    monkeypatch.setattr(kernels, "NUM_CASES", 2)
    first = run_part(kernels.check_kernels, tmp_path)[0]
    assert first.agrees is False
    assert first.value == pytest.approx(0.5, rel=0.01)
    assert first.note == "2 cases; 2 differ: 0, 1"


def test_cases_that_do_not_fit_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_part(monkeypatch, FakeLibrary())
    refused = BuildError("a kernel", "fits", "not", "take smaller tiles")

    def compile_first(jobs: Any) -> Any:
        for index, (name, compile_one) in enumerate(jobs):
            yield name, compile_one() if index == 0 else refused

    monkeypatch.setattr(kernels, "compile_ahead", compile_first)
    monkeypatch.setattr(kernels, "NUM_CASES", 1)
    told = {finding.what: finding for finding in run_part(kernels.check_kernels, tmp_path)}
    assert told["float16, float16 pool, case's configuration"].note == (
        "0 cases; 1 need more shared memory than there is: 0"
    )
    assert told["all kinds"].value == 1


def test_time_that_is_over_ends_a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_part(monkeypatch, FakeLibrary())
    assert run_part(kernels.check_kernels, tmp_path, 0)[-1].value == 1
    left_out = run_part(kernels.check_commit, tmp_path, 0)[0]
    assert (left_out.value, left_out.agrees) == (kernels.NUM_COMMIT_CASES, False)


def test_an_architecture_without_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_part(monkeypatch, FakeLibrary())
    monkeypatch.setattr(Gpu, "architecture", 75)
    with pytest.raises(BuildError, match=r"is of one of the architectures 80, 86, 89, 90, 100, 120, or 8\.y; got 75"):
        run_part(kernels.check_kernels, tmp_path)


def test_the_commit_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = FakeLibrary()
    fake_part(monkeypatch, library)
    told = run_part(kernels.check_commit, tmp_path)
    assert len(told) == 7
    assert all(finding.agrees for finding in told)
    assert library.launched == ["commit_rows"] * kernels.NUM_COMMIT_CASES
    assert library.num_allocations == 0


@pytest.mark.parametrize("number", range(7))
def test_wrong_numbers_of_a_commit_are_counted(number: int) -> None:
    case = make_commit_case(number)
    gpu = Gpu(CudaDriver(FakeLibrary()))
    (kernel,) = (kernel for kernel in fake_compile(case.shape, [89]) if kernel.name == "commit_rows")
    pools = kernels.run_commit(gpu, kernel, case.shape, case.arrays())
    assert count_wrong(case, pools) == 0
    pools.reshape(-1)[[0, -1]] = np.array([40, np.nan], np.float32).astype(pools.dtype)
    assert count_wrong(case, pools) == 2


def test_a_failure_of_the_driver_is_named() -> None:
    class Failing(FakeLibrary):
        def cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: N802
            return 700

    with pytest.raises(ValueError, match="CUDA: cuMemAlloc_v2 succeeds; got CUDA_ERROR_ILLEGAL_ADDRESS"):
        Gpu(CudaDriver(Failing())).allocate(1)


def test_bandwidth_is_what_is_needed_by_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake launch takes half a millisecond, a copy a second for 100 MB."""
    fake_part(monkeypatch, FakeLibrary())
    shape = KernelShape(4, 2, 16, 16)
    monkeypatch.setattr(bandwidth, "SHAPES", {"small": shape})
    monkeypatch.setattr(bandwidth, "CONTEXTS", (1024,))
    monkeypatch.setattr(bandwidth, "BATCHES", ((2, 1),))
    monkeypatch.setattr(bandwidth, "COPIED_BYTES", 1 << 20)
    limit, copied, step = run_part(bandwidth.check_bandwidth, tmp_path)
    assert limit.value == pytest.approx(2 * 6.251 * 192 / 8)
    assert copied.value == pytest.approx(0.2, rel=1e-3)
    needed = needed_bytes(shape, attention_step.decoding_step(shape, 2, 1, 1024)).total
    assert step.what == "small: 2 x 1 nodes behind 1,024"
    assert step.value == pytest.approx(needed / 1e-3 / 1e9)  # two launches
    assert step.note.startswith("1000.0 us, ")


def test_a_pool_that_is_too_large_is_not_measured() -> None:
    gpu = Gpu(CudaDriver(FakeLibrary()))
    shape = KernelShape(32, 32, 256, 16, "float32", "float32")
    big = PluginKernels(shape, fake_compile(shape, [89]))
    assert "too large" in bandwidth.measure_step(gpu, "big", big, 16, 1, 32768, 300e9).note


def test_the_default_is_compared_with_the_best(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best takes a third of the default's time; of what is not measured nothing is said."""
    fake_part(monkeypatch, FakeLibrary())
    shape = KernelShape(32, 8, 128, 16)
    monkeypatch.setattr(configurations, "SHAPES", {"one": shape})

    def measure(gpu: Gpu, shape: KernelShape, compiled: Any, workload: Any) -> float:
        return 3.0 if compiled[0].configuration.num_stages == 2 else 1.0

    monkeypatch.setattr(configurations, "_measure_us", measure)
    *rows, count = run_part(configurations.check_tuning, tmp_path)
    assert [finding.value for finding in rows] == [3.0] * 6
    assert rows[0].note == "default 3.0 us, best 1.0 us"
    assert count.value > 10
    assert "num_stages=3" in count.note.split("; default")[0]


def add(one: int, other: int) -> tuple[Any, ...]:
    if one == other:
        raise BuildError("sum", "of two numbers", one, "take others")
    return (one + other,)


def test_jobs_are_done_in_processes_and_come_in_order() -> None:
    jobs = [(number, partial(add, number, 2)) for number in range(5)]
    found = list(kernels.compile_ahead(jobs))
    assert [name for name, _ in found] == [0, 1, 2, 3, 4]
    assert [one for _, one in found if isinstance(one, tuple)] == [(2,), (3,), (5,), (6,)]
    assert isinstance(found[2][1], BuildError)


def test_a_case_is_launched_as_the_plugin_launches_it() -> None:
    """Case 5 has a float8 pool, whose scales travel with the call."""
    case = make_case(5)
    compiled = fake_compile(case.shape, [89], configuration=case.configuration)
    library = FakeLibrary()
    assert kernels.kernel_difference(Gpu(CudaDriver(library)), case, compiled) < 1e-2
    assert library.launched == ["tree_attention", "tree_attention_reduce"]

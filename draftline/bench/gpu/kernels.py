"""Parts ``kernels`` and ``commit``: compiled code, launched as the plugin launches it, against the oracle."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftline.bench.gpu.device import STREAM, Gpu, open_gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.errors import BuildError
from draftline.kernels.cases import NUMPY_DTYPES, KernelCase, expected, kernel_inputs, make_case, tolerance
from draftline.kernels.commit_cases import count_wrong, make_commit_case
from draftline.kernels.compilation import compile_kernels
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.launches import commit_launch
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.plugin_kernels import ATTENTION_KERNELS, PluginKernels, find_fitting
from draftline.sessions.tensorrt.plugin_launch import AttentionCall, launch_attention

NUM_CASES, NUM_COMMIT_CASES = 200, 40
NUM_AHEAD = 2  # compilations a core that wait for the GPU at most
Compiled = tuple[CompiledKernel, ...]
Job = TypeVar("Job")


def kernel_cache(output: Path) -> Path:
    return output / "kernel-cache"


def code_architecture(gpu: Gpu) -> int:
    """Return the architecture whose code runs on ``gpu``. Raises: BuildError where kernels are compiled for none."""
    found = find_fitting(ARCHITECTURES, gpu.architecture)
    if found is None:
        known = ", ".join(map(str, ARCHITECTURES))
        rule = f"is of one of the architectures {known}, or 8.y"
        raise BuildError("this machine's GPU", rule, gpu.architecture, "check on a machine with one of them")
    return found


def compile_ahead(jobs: Sequence[tuple[Job, Callable[[], Compiled]]]) -> Iterator[tuple[Job, Compiled | BuildError]]:
    """Compile on all cores, each job in a process; yield what came of them in their order."""
    num_workers = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context) as pool:
        waiting: list[tuple[Job, Future[Compiled]]] = []
        rest = iter(jobs)
        try:
            while True:
                while len(waiting) < NUM_AHEAD * num_workers and (job := next(rest, None)):
                    waiting.append((job[0], pool.submit(job[1])))
                if not waiting:
                    return
                name, future = waiting.pop(0)
                try:
                    yield name, future.result()
                except BuildError as error:
                    yield name, error
        finally:
            for _, future in waiting:
                future.cancel()


@dataclass
class _Cases:
    """The cases of one kind: how far each is from the oracle, and those that this GPU cannot run."""

    limit: float
    differences: dict[int, float] = field(default_factory=dict)
    not_run: list[int] = field(default_factory=list)

    def finding(self, kind: str) -> Finding:
        notes = [f"{len(self.differences)} cases"]
        differing = [number for number, difference in self.differences.items() if not difference <= self.limit]
        for numbers, text in ((differing, "differ"), (self.not_run, "need more shared memory than there is")):
            if numbers:
                notes.append(f"{len(numbers)} {text}: {', '.join(map(str, numbers[:20]))}")
        largest = float(np.max(list(self.differences.values()), initial=0.0))  # NaN where one is
        return Finding(kind, largest, "largest difference", self.limit, "; ".join(notes))


def check_kernels(call: PartCall) -> None:
    """The random cases of ``scripts/check_kernels``, each in the configuration that kernels have by default and in its
    own, whose sections are short."""
    gpu = open_gpu()
    architecture, cache = code_architecture(gpu), kernel_cache(call.output)
    jobs: list[tuple[tuple[int, str], Callable[[], Compiled]]] = []
    for number in range(NUM_CASES):
        case = make_case(number)
        default = default_configuration(case.shape, architecture)
        for name, configuration in (("default configuration", default), ("case's configuration", case.configuration)):
            compile_one = partial(compile_kernels, case.shape, (architecture,), cache, configuration)
            jobs.append(((number, name), compile_one))
    by_kind: dict[str, _Cases] = {}
    for (number, name), compiled in compile_ahead(jobs):
        case = make_case(number)
        kind = f"{case.shape.dtype}, {case.shape.kv_dtype} pool, {name}"
        cases = by_kind.setdefault(kind, _Cases(tolerance(case.shape.dtype)))
        if isinstance(compiled, BuildError):
            cases.not_run.append(number)
        else:
            cases.differences[number] = kernel_difference(gpu, case, compiled)
        if call.is_over:
            break
    num_checked = sum(len(cases.differences) for cases in by_kind.values())
    if not num_checked:
        raise BuildError("kernels", "some case is checked in the time", "none", "give the check more --minutes")
    for kind, cases in sorted(by_kind.items()):
        call.tell(cases.finding(kind))
    call.tell(Finding("all kinds", num_checked, f"of {len(jobs)} calls checked"))


def kernel_difference(gpu: Gpu, case: KernelCase, compiled: Compiled) -> float:
    """Return the largest difference of the kernels from the oracle in ``case``; NaN where a row was not written."""
    inputs = kernel_inputs(case)
    attention = tuple(kernel for kernel in compiled if kernel.name in ATTENTION_KERNELS)
    out = run_attention(gpu, PluginKernels(case.shape, attention), inputs, case)
    return float(np.abs(out.astype(np.float64) - expected(case, inputs)).max())


def run_attention(gpu: Gpu, kernels: PluginKernels, inputs: dict[str, NDArray[Any]], case: KernelCase) -> NDArray[Any]:
    """Run the attention kernels on ``gpu``; return ``out [T, H D]``, NaN where nothing was written."""
    shape, (num_tokens, mask_words) = kernels.shape, inputs["packed_mask"].shape
    num_sequences, max_blocks = inputs["block_table"].shape
    out = np.full((num_tokens, shape.num_heads * shape.head_size), np.nan, NUMPY_DTYPES[shape.dtype])
    pointers = {name: gpu.upload(array) for name, array in inputs.items()} | {"out": gpu.upload(out)}
    size = kernels.workspace_bytes(num_tokens, num_sequences, max_blocks)
    pointers["workspace"] = gpu.allocate(size)
    gpu.fill(pointers["workspace"], 0xFF, size)  # NaN: nothing may be read there that was not written
    call = AttentionCall(
        kernels, pointers, num_tokens, num_sequences, max_blocks, mask_words, case.scale, STREAM,
        case.key_scale, case.value_scale,
    )  # fmt: skip
    launch_attention(gpu.driver, call)
    gpu.download(pointers["out"], out)
    gpu.free(*pointers.values())
    return out


def check_commit(call: PartCall) -> None:
    """Rows to slots of all layers: each number is the nearest that the pool holds, and nothing else is written."""
    gpu = open_gpu()
    architecture, cache = code_architecture(gpu), kernel_cache(call.output)
    wrong: dict[str, list[int]] = {}
    for number in range(NUM_COMMIT_CASES):
        if call.is_over:
            call.tell_left_out(NUM_COMMIT_CASES - number, "cases")
            break
        case = make_commit_case(number)
        shape = case.shape
        (kernel,) = (
            kernel for kernel in compile_kernels(shape, (architecture,), cache) if kernel.name == "commit_rows"
        )
        found = run_commit(gpu, kernel, shape, case.arrays())
        wrong.setdefault(f"rows of {shape.dtype}, pool of {shape.kv_dtype}", []).append(count_wrong(case, found))
    for kind, counts in sorted(wrong.items()):
        call.tell(Finding(kind, sum(counts), "wrong numbers", 0, f"{len(counts)} cases"))


def run_commit(gpu: Gpu, kernel: CompiledKernel, shape: KernelShape, arrays: dict[str, NDArray[Any]]) -> NDArray[Any]:
    """Run the kernel on ``gpu``; return the pools after it."""
    pools = arrays["kv_pools"].copy()
    pointers = {name: gpu.upload(array) for name, array in arrays.items()}
    values: dict[str, int] = {**pointers, "layer_stride": pools[0].size, **dict.fromkeys(kernel.arguments[-2:], 0)}
    arguments = [(kind, values[name]) for name, kind in zip(kernel.arguments, kernel.argument_types, strict=True)]
    function = gpu.driver.load_function(kernel.cubin, kernel.entry, kernel.shared_bytes)
    launch = commit_launch(len(arrays["rows"]), len(pools))
    gpu.driver.launch(function, launch.grid, 32 * kernel.num_warps, kernel.shared_bytes, STREAM, arguments)
    gpu.download(pointers["kv_pools"], pools)
    gpu.free(*pointers.values())
    return pools

"""Part ``tuning``: default configurations against the best that ``draftline.kernels.tuning`` finds."""

from __future__ import annotations

from functools import partial

from draftline.bench.gpu.attention_step import decoding_step, place_step
from draftline.bench.gpu.device import Gpu, open_gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.kernels import Compiled, code_architecture, compile_ahead, kernel_cache
from draftline.errors import BuildError
from draftline.kernels.compilation import compile_kernels
from draftline.kernels.cost import WORKLOADS, Workload
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.tuning import tune, tuning_candidates
from draftline.sessions.tensorrt.plugin_kernels import ATTENTION_KERNELS, PluginKernels

SHAPES = {
    "32 / 8 heads of 128, float16": KernelShape(32, 8, 128, 16),
    "9 / 3 heads of 64, float16": KernelShape(9, 3, 64, 16),
    "32 / 8 heads of 128, float8 pool": KernelShape(32, 8, 128, 16, "bfloat16", "float8_e4m3fn"),
}
NUM_CALLS = 10


def check_tuning(call: PartCall) -> None:
    """Nothing is compared: a default that is slower than another is not wrong."""
    gpu = open_gpu()
    architecture = code_architecture(gpu)
    for done, (name, shape) in enumerate(SHAPES.items()):
        if call.is_over:
            call.tell(Finding("tuned in the time", done, f"of {len(SHAPES)} shapes"))
            return
        measured = measure_candidates(gpu, call, shape, architecture)
        default = next(iter(tuning_candidates(shape, architecture)))

        def look_up(
            shape: KernelShape,
            configuration: KernelConfiguration,
            workload: Workload,
            measured: dict[tuple[KernelConfiguration, Workload], float] = measured,
        ) -> float:
            if (configuration, workload) not in measured:
                raise BuildError("tuning", "the configuration was measured", "it was not", "it is left out")
            return measured[configuration, workload]

        best = tune(shape, architecture, look_up)
        for workload in WORKLOADS:
            what = f"{name}: {workload.num_sequences} x {workload.num_nodes} nodes behind {workload.context:,}"
            ours, others = measured[default, workload], measured[best, workload]
            note = f"default {ours:.1f} us, best {others:.1f} us"
            call.tell(Finding(what, ours / others, "times the best configuration's time", note=note))
        num_measured = len({configuration for configuration, _ in measured})
        call.tell(Finding(f"{name}: candidates", num_measured, "measured", note=f"best {best}; default {default}"))


def measure_candidates(
    gpu: Gpu, call: PartCall, shape: KernelShape, architecture: int
) -> dict[tuple[KernelConfiguration, Workload], float]:
    """Return microseconds of the candidates that compile, the default first, as many as the time allows."""
    jobs = [
        (candidate, partial(compile_kernels, shape, (architecture,), kernel_cache(call.output), candidate))
        for candidate in tuning_candidates(shape, architecture)
    ]
    measured: dict[tuple[KernelConfiguration, Workload], float] = {}
    for candidate, compiled in compile_ahead(jobs):
        if not isinstance(compiled, BuildError):
            measured |= {(candidate, workload): _measure_us(gpu, shape, compiled, workload) for workload in WORKLOADS}
        if call.is_over:
            break
    return measured


def _measure_us(gpu: Gpu, shape: KernelShape, compiled: Compiled, workload: Workload) -> float:
    kernels = PluginKernels(shape, tuple(kernel for kernel in compiled if kernel.name in ATTENTION_KERNELS))
    step = decoding_step(shape, workload.num_sequences, workload.num_nodes, workload.context)
    placed = place_step(gpu, kernels, step)
    microseconds = gpu.median_us(lambda: placed.enqueue(gpu), NUM_CALLS)
    placed.free(gpu)
    return microseconds

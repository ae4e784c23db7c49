"""Part ``bandwidth``: what decoding attention moves in a second, against what the memory can."""

from __future__ import annotations

from draftline.bench.gpu.attention_step import decoding_step, place_step, pool_bytes
from draftline.bench.gpu.device import Gpu, open_gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.kernels import code_architecture, kernel_cache
from draftline.kernels.counted import moved_bytes, needed_bytes
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels, compile_plugin_kernels

SHAPES = {
    "SmolLM2-135M, float16": KernelShape(9, 3, 64, 16),
    "32 / 8 heads of 128, float16": KernelShape(32, 8, 128, 16),
    "32 / 8 heads of 128, float8 pool": KernelShape(32, 8, 128, 16, "bfloat16", "float8_e4m3fn"),
}
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = ((1, 1), (16, 1), (1, 16))  # sequences, and nodes of each
COPIED_BYTES = 1 << 30
MEMORY_SHARE = 0.5  # of the GPU's, that a pool may take


def check_bandwidth(call: PartCall) -> None:
    """Decoding at contexts of 1k to 32k; nothing is compared, as no limit is promised."""
    gpu = open_gpu()
    limit, copied = gpu.memory_limit, measure_copy(gpu)
    if limit is not None:
        call.tell(Finding("memory clock x bus", limit / 1e9, "GB/s"))
    share = "" if limit is None else f"{copied / limit:.2f} of memory clock x bus"
    call.tell(Finding(f"copy of {COPIED_BYTES >> 20} MiB, read and written", copied / 1e9, "GB/s", note=share))
    cases = [(name, *batch, context) for batch in BATCHES for context in CONTEXTS for name in SHAPES]
    kernels = {
        name: compile_plugin_kernels(shape, (code_architecture(gpu),), kernel_cache(call.output))
        for name, shape in SHAPES.items()
    }
    for done, (name, num_sequences, num_nodes, context) in enumerate(cases):
        if call.is_over:
            call.tell(Finding("measured in the time", done, f"of {len(cases)} steps"))
            return
        call.tell(measure_step(gpu, name, kernels[name], num_sequences, num_nodes, context, limit or copied))


def measure_copy(gpu: Gpu) -> float:
    """Return bytes a second that the device's own copy reads and writes."""
    source, destination = gpu.allocate(COPIED_BYTES), gpu.allocate(COPIED_BYTES)
    microseconds = gpu.median_us(lambda: gpu.copy(destination, source, COPIED_BYTES))
    gpu.free(source, destination)
    return 2 * COPIED_BYTES / (1e-6 * microseconds)


def measure_step(
    gpu: Gpu, name: str, kernels: PluginKernels, num_sequences: int, num_nodes: int, context: int, limit: float
) -> Finding:
    """Measure one step in the default configuration; ``limit`` in bytes a second."""
    shape = kernels.shape
    step = decoding_step(shape, num_sequences, num_nodes, context)
    what = f"{name}: {num_sequences} x {num_nodes} nodes behind {context:,}"
    if pool_bytes(shape, step) > MEMORY_SHARE * gpu.memory_bytes:
        return Finding(what, 0.0, "GB/s", note="not measured: the pool is too large for this GPU")
    placed = place_step(gpu, kernels, step)
    microseconds = gpu.median_us(lambda: placed.enqueue(gpu))
    placed.free(gpu)
    needed = needed_bytes(shape, step).total
    configuration = kernels.find("tree_attention", kernels.fitting(gpu.architecture)).configuration
    ratio = moved_bytes(shape, configuration, step).total / needed
    rate = needed / (1e-6 * microseconds)
    note = f"{microseconds:.1f} us, {needed / 1e6:.1f} MB needed, {ratio:.3f} of them moved; share {rate / limit:.2f}"
    return Finding(what, rate / 1e9, "GB/s", note=note)

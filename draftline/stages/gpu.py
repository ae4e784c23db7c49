"""What a pipeline says about engines on a GPU, in the words of the floors below."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.config import Pipeline
from draftline.config.rules import GPU_BACKENDS, LEAST_FLOAT8
from draftline.stages.inputs import package_version
from draftline.stages.stage import Advance, StageCall, setting_of

if TYPE_CHECKING:
    from draftline.sessions.engine_config import PoolDtype, PoolScales
    from draftline.sessions.tensorrt.network_check import NetworkReport
    from draftline.sessions.tensorrt.profiles import StepLimits
    from draftline.sessions.tensorrt.vendor import Vendor

KERNEL_CACHE, TIMING_CACHE = "kernel-cache", "timing.cache"  # beside the stages' outputs; they only save time
MAX_PARAMETERS = 1_000_000_000  # of a model whose network is checked unasked
VENDOR_PACKAGES = ("tensorrt-cu13", "tensorrt-rtx-cu13", "triton")


def is_on_gpu(pipeline: Pipeline) -> bool:
    return pipeline.engine.backend in GPU_BACKENDS


def gpu_inputs(pipeline: Pipeline, settings: Sequence[str] = ()) -> dict[str, str]:
    """Return what a stage's output follows from on a GPU alone: the vendors' packages, and these ``settings``."""
    if not is_on_gpu(pipeline):
        return {}
    inputs = {f"package {name}": package_version(name) for name in VENDOR_PACKAGES}
    return inputs | {f"setting {name}": json.dumps(setting_of(pipeline, name)) for name in settings}


def vendor_of(pipeline: Pipeline) -> tuple[Vendor, tuple[int, ...]]:
    """Import the vendor of a pipeline on a GPU; return it and the architectures that it builds for.

    Raises: MissingPackageError without its package, BuildError where it does not build for these GPUs, or not here.
    """
    from draftline.kernels.devices import ARCHITECTURES
    from draftline.sessions.tensorrt.plan_builder import choose_architectures
    from draftline.sessions.tensorrt.vendor import import_vendor

    backend = pipeline.engine.backend
    assert backend in ("tensorrt", "tensorrt_rtx"), "asked of pipelines on a GPU"
    vendor = import_vendor(backend)
    least = LEAST_FLOAT8 if pipeline.engine.weights_dtype == "float8" else 0
    usable = [architecture for architecture in ARCHITECTURES if architecture >= least]
    return vendor, choose_architectures(vendor, pipeline.engine.compute_capabilities, usable)


def check_machine(pipeline: Pipeline, stages: Collection[str]) -> None:
    """Refuse, before any work, stages that this machine cannot run.

    Raises: what ``vendor_of`` raises, of what it cannot build; ArtifactError where there is no GPU for the stage that
    runs the engine.
    """
    if not is_on_gpu(pipeline):
        return
    if "build" in stages:
        from draftline.kernels.source import import_triton

        vendor_of(pipeline)
        import_triton()
    if "smoke" in stages:
        from draftline.sessions.tensorrt.device_engine import require_driver

        require_driver(f"{pipeline.name}: stage smoke")


def step_limits(pipeline: Pipeline) -> StepLimits:
    """Return what bounds the sizes of a step."""
    from draftline.sessions.tensorrt.profiles import StepLimits
    from draftline.stages.drafts import tree_shape
    from draftline.tree_growth import max_frontier_nodes, widest_frontier

    engine, kv_cache, shape = pipeline.engine, pipeline.kv_cache, tree_shape(pipeline)
    return StepLimits(
        engine.max_batch_size,
        engine.max_seq_len,
        engine.max_num_tokens,
        kv_cache.block_size,
        kv_cache.max_blocks,
        *(() if shape is None else (shape.max_nodes, widest_frontier(shape), max_frontier_nodes(shape))),
    )


def check_network(
    call: StageCall, checkpoint: Path, num_parameters: int, token_ids: list[int], scales: PoolScales
) -> tuple[NetworkReport, ...] | None:
    """Compare the networks of a pipeline on a GPU with ONNX Runtime; None where that is not asked for.

    ``scales``: of a float8 pool.

    Raises: what ``vendor_of`` and ``check_networks`` raise.
    """
    pipeline = call.pipeline
    if not is_on_gpu(pipeline):
        return None
    vendor, _ = vendor_of(pipeline)
    wanted = pipeline.check.network
    if wanted == "never" or (wanted == "auto" and num_parameters > MAX_PARAMETERS):
        if wanted == "auto":
            size = f"{num_parameters / 1e9:.1f} billion parameters"
            call.say(f"the network is not checked unasked of {size}; check.network=always asks for it")
        return None
    from draftline.sessions.tensorrt.network_check import check_networks
    from draftline.stages.drafts import draft_sources, tree_shape

    with tempfile.TemporaryDirectory(dir=call.destination) as scratch:
        reports = check_networks(
            vendor,
            checkpoint,
            Path(scratch),
            dtype=pipeline.target.dtype,
            weights_dtype=pipeline.engine.weights_dtype,
            pool_dtype=_pool_dtype(pipeline),
            pool_scales=scales,
            limits=step_limits(pipeline),
            token_ids=token_ids,
            drafts=draft_sources(pipeline, call.build_directory),
            tree=tree_shape(pipeline),
            num_threads=pipeline.engine.num_threads,
        )
    for report in reports:
        furthest = max(report.differences, key=lambda name: report.differences[name])
        call.say(
            f"network of {report.graph}: {report.num_layers} layers in {report.dtype}, {report.num_plugins} of them "
            f"TreeAttention; {furthest} differs most from ONNX Runtime, by {report.differences[furthest]:.1e}"
        )
    return reports


def _pool_dtype(pipeline: Pipeline) -> PoolDtype:
    dtype = pipeline.kv_cache.dtype
    return "float8_e4m3fn" if dtype == "float8" else dtype


def pool_scales(call: StageCall, advance: Advance) -> PoolScales:
    """Measure the scales of a float8 pool on the text that perplexity is measured on; none of another pool."""
    if call.pipeline.kv_cache.dtype != "float8":
        return ()
    from draftline.checkpoints.tokenizer import load_tokenizer
    from draftline.sessions.pool_scales import measure_pool_scales
    from draftline.stages.perplexity_text import PASSAGES

    checkpoint = call.build_directory / "checkpoint"
    tokenizer = load_tokenizer(checkpoint)
    texts = [tokenizer.encode(passage)[: call.pipeline.engine.max_seq_len] for passage in PASSAGES]
    with tempfile.TemporaryDirectory(dir=call.destination) as scratch:
        scales = measure_pool_scales(
            checkpoint, Path(scratch), texts, num_threads=call.pipeline.engine.num_threads, progress=advance
        )
    keys, values = ([f"{scale:g}" for scale in sorted(set(column))] for column in zip(*scales, strict=True))
    call.say(f"scales of the float8 pool, by layer: keys {' '.join(keys)}; values {' '.join(values)}")
    return scales


def build_plans(call: StageCall) -> None:
    """Write the engine of a pipeline on a GPU into ``call.destination``."""
    from draftline.sessions.tensorrt.engine_builder import PlanSettings, build_tensorrt_engine
    from draftline.stages.drafts import CAPTURED_LAYERS_FILE, acceptance, draft_sources, tree_shape

    pipeline = call.pipeline
    vendor, architectures = vendor_of(pipeline)
    numbers = ", ".join(map(str, architectures))
    call.say(f"{vendor.title}, for compute capabilities {numbers}; what it says is in engine/build.log")
    build_tensorrt_engine(
        vendor,
        call.build_directory / "checkpoint",
        call.destination,
        settings=PlanSettings(
            dtype=pipeline.target.dtype,
            weights_dtype=pipeline.engine.weights_dtype,
            pool_dtype=_pool_dtype(pipeline),
            pool_scales=pool_scales(call, call.advance),
            weights=pipeline.engine.weights,
            plugin=pipeline.engine.plugin,
            architectures=architectures,
            kernel_cache=call.build_directory / KERNEL_CACHE,
            timing_cache=call.build_directory / TIMING_CACHE,
        ),
        limits=step_limits(pipeline),
        prefix_cache=pipeline.kv_cache.prefix_cache,
        progress=call.advance,
        drafts=draft_sources(pipeline, call.build_directory, call.build_directory / "check" / CAPTURED_LAYERS_FILE),
        tree=tree_shape(pipeline),
        acceptance=acceptance(pipeline),
        free_gpu_memory_fraction=pipeline.kv_cache.free_gpu_memory_fraction,
        cuda_graphs=pipeline.engine.cuda_graphs,
    )

"""Build an engine directory for TensorRT or TensorRT-RTX: plans, external weights, ``config.json``, ``build.log``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import onnx

from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.kernels.shape import KernelShape
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.engine_config import (
    TOKENIZER_FILES,
    EngineConfig,
    PlanFacts,
    PluginForm,
    PoolDtype,
    PoolScales,
    TensorRtFacts,
    write_engine_config,
)
from draftline.sessions.tensorrt.commit_kernel import commit_file, compile_commit_kernels
from draftline.sessions.tensorrt.emission import EmittedGraph, emit_graphs, make_weights_inputs
from draftline.sessions.tensorrt.loading import WEIGHTS_LIST
from draftline.sessions.tensorrt.network import parse_network
from draftline.sessions.tensorrt.plan_builder import build_plan
from draftline.sessions.tensorrt.plugin import plugin_sha256
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels, compile_plugin_kernels
from draftline.sessions.tensorrt.profiles import StepLimits
from draftline.sessions.tensorrt.quick_plugin import compile_quick_plugin_kernels
from draftline.sessions.tensorrt.vendor import Vendor
from draftline.speculation import EXACT, Acceptance, TreeShape

LOG_FILE = "build.log"
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class PlanSettings:
    """How plans are built. ``architectures``: the GPUs they are for, by ``choose_architectures``.

    ``kernel_cache``: a folder of compiled kernels. ``timing_cache``: a file of what TensorRT measured. ``pool_scales``:
    of a float8 pool. ``plugin``: the form of TreeAttention.
    """

    dtype: NetworkDtype
    weights_dtype: str
    pool_dtype: PoolDtype
    weights: Literal["embedded", "external"]
    architectures: tuple[int, ...]
    kernel_cache: Path
    timing_cache: Path
    pool_scales: PoolScales = ()
    plugin: PluginForm = "runtime"


def build_tensorrt_engine(
    vendor: Vendor,
    checkpoint: Path,
    destination: Path,
    *,
    settings: PlanSettings,
    limits: StepLimits,
    prefix_cache: bool,
    progress: Advance,
    drafts: Sequence[DraftSource] = (),
    tree: TreeShape | None = None,
    acceptance: Acceptance = EXACT,
    free_gpu_memory_fraction: float = 0.9,
    cuda_graphs: bool = True,
) -> None:
    """Write the engine of a converted checkpoint into the existing folder ``destination``.

    ``model.plan`` and, of each drafter with a graph, ``draft-I.plan``; beside each the kernel that commits its rows,
    ``model.kernels`` and so on. With external weights also the converted
    checkpoint's files (hard-linked) and ``weights.json``, which says where in them each input of a plan lies.

    Raises: BuildError where the vendor refuses the graph or the network, and for drafts that do not fit.
    """
    emitted = emit_graphs(
        checkpoint,
        destination,
        dtype=settings.dtype,
        weights_dtype=settings.weights_dtype,
        pool_dtype=settings.pool_dtype,
        pool_scales=settings.pool_scales,
        limits=limits,
        drafts=drafts,
        tree=tree,
    )
    plans, weights = [], {}
    with (destination / LOG_FILE).open("w", encoding="utf-8") as log:
        for index, graph in enumerate(emitted.graphs):
            if settings.weights == "external":
                weights[graph.plan_file] = _take_weights_out(graph.file)
            kernels = [_compile(shape, settings) for shape in graph.kernel_shapes]
            advance = _part_of(progress, index, len(emitted.graphs))
            plan = build_graph_plan(vendor, graph, kernels, log, advance, settings.timing_cache, settings.plugin)
            (destination / graph.plan_file).write_bytes(plan)
            pool, hashes = (graph.kernel_shape.kv_dtype, graph.pool_scales), tuple(own.sha256 for own in kernels)
            plans.append(PlanFacts(graph.plan_file, hashes, graph.profiles, *pool))
            commit = compile_commit_kernels(graph.kernel_shape, settings.architectures, settings.kernel_cache)
            (destination / commit_file(graph.plan_file)).write_bytes(commit.archive)
            graph.file.unlink()
    if settings.weights == "external":
        (destination / WEIGHTS_LIST).write_text(json.dumps(weights, indent=1) + "\n", encoding="utf-8")
    else:
        for path in destination.glob("*.safetensors"):
            path.unlink()
    for name in TOKENIZER_FILES:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, destination / name)
    facts = TensorRtFacts(
        vendor_version=vendor.version,
        dtype=settings.dtype,
        weights=settings.weights,
        compute_capabilities=settings.architectures,
        plugin=settings.plugin,
        plugin_sha256=plugin_sha256(),
        plans=tuple(plans),
        free_gpu_memory_fraction=free_gpu_memory_fraction,
        cuda_graphs=cuda_graphs,
    )
    write_engine_config(
        destination,
        EngineConfig(
            backend=vendor.backend,
            kernels="plugin",
            weights_dtype=settings.weights_dtype,
            pool_dtype=settings.pool_dtype,
            max_batch_size=limits.max_batch_size,
            max_seq_len=limits.max_seq_len,
            max_num_tokens=limits.max_num_tokens,
            num_threads=0,
            block_size=limits.block_size,
            max_blocks=limits.max_blocks,
            prefix_cache=prefix_cache,
            model=emitted.model,
            drafts=emitted.drafts,
            tree=tree,
            acceptance=acceptance,
            tensorrt=facts,
        ),
    )


def build_graph_plan(
    vendor: Vendor,
    graph: EmittedGraph,
    kernels: Sequence[PluginKernels],
    log: TextIO,
    progress: Advance,
    timing_cache: Path | None = None,
    plugin: PluginForm = "runtime",
) -> bytes:
    """Parse an emitted graph and build its plan, for the architectures of ``kernels``.

    The vendor's lines go to ``log``.
    """

    def write_line(line: str) -> None:
        log.write(line + "\n")

    architectures = kernels[0].architectures
    write_line(f"{graph.name}: {vendor.title}, architectures {', '.join(map(str, architectures))}")
    with ExitStack() as opened:
        network = parse_network(vendor, graph.file, kernels, write_line, opened, plugin)
        model = onnx.load(graph.file, load_external_data=False)
        return build_plan(network, model, graph.profiles, architectures, progress, timing_cache)


def _compile(shape: KernelShape, settings: PlanSettings) -> PluginKernels:
    if settings.plugin == "runtime":
        return compile_plugin_kernels(shape, settings.architectures, settings.kernel_cache)
    (architecture,) = settings.architectures  # TensorRT builds for one GPU
    return compile_quick_plugin_kernels(shape, architecture, settings.kernel_cache)


def _take_weights_out(file: Path) -> dict[str, dict[str, object]]:
    """Make inputs of the weights of the graph in ``file``; return what ``weights.json`` says of each."""
    model = onnx.load(file, load_external_data=False)
    locations = make_weights_inputs(model)
    onnx.save(model, file)
    return {name: location._asdict() for name, location in locations.items()}


def _part_of(advance: Advance, index: int, num_parts: int) -> Advance:
    return lambda done, total: advance(index * total + done, num_parts * total)

"""Tiny networks for TensorRT-RTX, which parses and builds without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from draftline.checkpoints.convert import convert_checkpoint
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelShape
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.engine_config import DraftMethod
from draftline.sessions.tensorrt.emission import EmittedGraphs, emit_graphs
from draftline.sessions.tensorrt.network import ParsedNetwork, parse_network
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels
from draftline.sessions.tensorrt.profiles import StepLimits
from draftline.sessions.tensorrt.vendor import Vendor, import_vendor
from draftline.speculation import TreeShape
from tests.sessions.tiny_engines import convert_tiny_draft
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

TREE = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=4)
LIMITS = StepLimits(max_batch_size=16, max_seq_len=256, max_num_tokens=64, block_size=16, max_blocks=128)
TREE_LIMITS = StepLimits(16, 256, 64, 16, 128, max_nodes=16, frontier_nodes=4, grown_nodes=12)


def rtx() -> Vendor:
    return import_vendor("tensorrt_rtx")


def convert_tiny(
    directory: Path, architecture: Architecture, dtype: str, methods: Sequence[DraftMethod] = ()
) -> tuple[Path, list[DraftSource]]:
    """Convert a tiny target and tiny drafts of ``methods``, each for it."""
    checkpoint, converted = directory / "checkpoint", directory / "converted"
    write_tiny_checkpoint(checkpoint, architecture, intermediate_size=128)
    convert_checkpoint(checkpoint, converted, dtype, lambda done, total: None)
    sources = []
    for method in methods:
        published = directory / method
        if method == "draft_model":
            write_tiny_checkpoint(published, architecture, intermediate_size=128, num_layers=1, seed=3)
        elif method == "medusa":
            write_tiny_medusa(published, checkpoint)
        elif method == "eagle3":
            write_tiny_eagle3(published, checkpoint)
        elif method in ("eagle1", "eagle2"):
            write_tiny_eagle1(published, checkpoint)
        has_weights = method != "ngram"
        draft = convert_tiny_draft(directory, method, published, converted, dtype) if has_weights else None
        sources.append(DraftSource(method, draft))
    return converted, sources


def emit_tiny(
    directory: Path,
    architecture: Architecture = "llama",
    dtype: NetworkDtype = "float16",
    methods: Sequence[DraftMethod] = (),
) -> EmittedGraphs:
    converted, drafts = convert_tiny(directory, architecture, dtype, methods)
    (directory / "graphs").mkdir()
    return emit_graphs(
        converted,
        directory / "graphs",
        dtype=dtype,
        pool_dtype=dtype,
        limits=TREE_LIMITS if drafts else LIMITS,
        drafts=drafts,
        tree=TREE if drafts else None,
    )


def parse_tiny(graphs: EmittedGraphs, opened: ExitStack, index: int = 0) -> ParsedNetwork:
    graph = graphs.graphs[index]
    kernels = [fake_kernels(shape) for shape in graph.kernel_shapes]
    return parse_network(rtx(), graph.file, kernels, lambda line: None, opened)


def fake_kernels(shape: KernelShape, architectures: Sequence[int] = (80, 120)) -> PluginKernels:
    """Kernels with code that no GPU runs, in no time."""
    arguments = {
        "tree_attention": ("q", "k_new", "out", "workspace", "scale", "num_tokens", "num_sections", "global_scratch"),
        "tree_attention_reduce": ("out", "workspace", "num_sequences"),
    }
    types = {"scale": "float32", "num_tokens": "int32", "num_sections": "int32", "num_sequences": "int32"}
    compiled = [
        CompiledKernel(
            name=name,
            architecture=architecture,
            entry=f"{name}_entry",
            cubin=f"\x7fELF code of {name} for sm_{architecture}\n".encode() * 4,
            ptx="",
            shared_bytes=64 * 1024,
            num_warps=4,
            num_registers=128,
            spill_bytes=0,
            arguments=own,
            argument_types=tuple(types.get(argument, "pointer") for argument in own),
            configuration=default_configuration(shape, architecture),
        )
        for architecture in architectures
        for name, own in arguments.items()
    ]
    return PluginKernels(shape, tuple(compiled))

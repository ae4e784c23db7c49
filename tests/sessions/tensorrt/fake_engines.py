"""Engine directories of the fake vendor, and the machine they run on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.kernels.arguments import SIGNATURES
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelShape
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.engine_config import DraftMethod
from draftline.sessions.tensorrt import device_engine, engine_builder, plugin
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from draftline.sessions.tensorrt.engine_builder import PlanSettings, build_tensorrt_engine
from draftline.sessions.tensorrt.plugin_kernels import SCRATCH, PluginKernels
from draftline.sessions.tensorrt.profiles import StepLimits
from draftline.speculation import TreeShape
from draftline.tree_growth import max_frontier_nodes, widest_frontier
from tests.sessions.tensorrt.fake_cuda import FakeCuda
from tests.sessions.tensorrt.fake_vendor import FakeVendorModule, fake_vendor, write_plan
from tests.sessions.tensorrt.plans import fake_kernels
from tests.sessions.tiny_engines import convert_tiny_draft

ARCHITECTURE = 89


class FakeMachine:
    """A machine with a GPU: what ``import_vendor`` and ``load_driver`` find on it."""

    def __init__(self, **cuda: Any) -> None:
        self.cuda = FakeCuda(**cuda)
        self.driver = CudaDriver(self.cuda)
        self.vendors = {backend: fake_vendor(self.cuda, backend) for backend in ("tensorrt", "tensorrt_rtx")}

    def module(self, backend: str = "tensorrt_rtx") -> FakeVendorModule:
        module: FakeVendorModule = self.vendors[backend].module
        return module


@contextmanager
def on_machine(machine: FakeMachine) -> Iterator[FakeMachine]:
    """Build and open engines on ``machine``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_engine, "import_vendor", lambda backend: machine.vendors[backend])
        patch.setattr(device_engine, "load_driver", lambda: machine.driver)
        patch.setattr(plugin, "ensure_parser_finds_library", lambda vendor: None)
        patch.setattr(engine_builder, "build_graph_plan", _build_fake_plan)
        patch.setattr(engine_builder, "compile_plugin_kernels", lambda shape, known, cache: fake_kernels(shape, known))
        patch.setattr(engine_builder, "compile_commit_kernels", lambda shape, known, cache: fake_commit(shape, known))
        yield machine


def _build_fake_plan(vendor: Any, graph: Any, kernels: Sequence[PluginKernels], log: Any, *rest: Any) -> bytes:
    model = onnx.load(graph.file, load_external_data=False)
    for tensor in model.graph.initializer:  # by hand: onnx opens no file with a second hard link
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            stored = (graph.file.parent / where["location"]).read_bytes()
            first = int(where["offset"])
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = stored[first : first + int(where["length"])]
    hashes = b"".join(bytes.fromhex(own.sha256) for own in kernels)
    return write_plan(model, {name: dict(own) for name, own in graph.profiles.items()}, hashes)


def fake_commit(shape: KernelShape, architectures: Sequence[int]) -> PluginKernels:
    """Code that ``FakeCuda`` runs."""
    kinds = {"*": "pointer", "i": "int64"}
    arguments = SIGNATURES["commit_rows"]
    compiled = [
        CompiledKernel(
            name="commit_rows",
            architecture=architecture,
            entry="commit_rows_entry",
            cubin=json.dumps(
                {
                    "kernel": "commit_rows",
                    "architecture": architecture,
                    "shape": {name: getattr(shape, name) for name in ("num_kv_heads", "head_size", "block_size")}
                    | {"dtype": shape.dtype, "kv_dtype": shape.kv_dtype},
                }
            ).encode(),
            ptx="",
            shared_bytes=0,
            num_warps=1,
            num_registers=32,
            spill_bytes=0,
            arguments=(*arguments, *SCRATCH),
            argument_types=(*(kinds[kind[0]] for kind in arguments.values()), *("pointer" for _ in SCRATCH)),
            configuration=default_configuration(shape, architecture),
        )
        for architecture in architectures
    ]
    return PluginKernels(shape, tuple(compiled))


def build_fake_engine(
    machine: FakeMachine,
    directory: Path,
    checkpoint: Path,
    *,
    backend: Any = "tensorrt_rtx",
    weights: Any = "embedded",
    drafts: Sequence[tuple[DraftMethod, Path | None]] = (),
    tree: TreeShape | None = None,
    max_batch_size: int = 16,
    max_seq_len: int = 256,
    max_num_tokens: int = 64,
    block_size: int = 16,
    max_blocks: int = 128,
    prefix_cache: bool = True,
    **serving: Any,
) -> Path:
    """As ``build_tiny_engine``, in float32 for ``machine``; call it inside of ``on_machine``."""
    converted, engine = directory / "converted-float32", directory / f"engine-{backend}-{weights}"
    if not converted.exists():
        convert_checkpoint(checkpoint, converted, "float32", lambda done, total: None)
    sources = [
        DraftSource(method, source and convert_tiny_draft(directory, method, source, converted, "float32"))
        for method, source in drafts
    ]
    nodes = () if tree is None else (tree.max_nodes, widest_frontier(tree), max_frontier_nodes(tree))
    engine.mkdir()
    build_tensorrt_engine(
        machine.vendors[backend],
        converted,
        engine,
        settings=PlanSettings(
            dtype="float32",
            weights_dtype="float32",
            pool_dtype="float32",
            weights=weights,
            architectures=(ARCHITECTURE,),
            kernel_cache=directory / "kernels",
            timing_cache=directory / "timing.cache",
        ),
        limits=StepLimits(max_batch_size, max_seq_len, max_num_tokens, block_size, max_blocks, *nodes),
        prefix_cache=prefix_cache,
        progress=lambda done, total: None,
        drafts=sources,
        tree=tree,
        **serving,
    )
    return engine

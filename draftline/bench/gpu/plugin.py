"""Part ``plugin``: TreeAttention alone in an engine of the vendor's, executed, against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.bench.gpu.device import STREAM, Gpu, open_gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.kernels import code_architecture, kernel_cache
from draftline.errors import ArtifactError
from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.graphs.tree_attention import load_tree_attention_function
from draftline.kernels.cases import (
    NUMPY_DTYPES,
    KernelCase,
    StepCase,
    branching,
    chain,
    expected,
    kernel_inputs,
    tolerance,
)
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.network import parse_network
from draftline.sessions.tensorrt.plan_builder import build_plan, choose_architectures
from draftline.sessions.tensorrt.plugin import SHAPE_FIELDS
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels, compile_plugin_kernels
from draftline.sessions.tensorrt.profiles import Profile, Range
from draftline.sessions.tensorrt.vendor import VENDORS, Backend, Vendor, import_vendor

ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
SHAPES = (
    KernelShape(9, 3, 64, 16, "float32", "float32"),
    KernelShape(32, 8, 128, 16, "float16", "float16"),
    KernelShape(8, 2, 96, 32, "bfloat16", "bfloat16", softcap=2.0),
    KernelShape(4, 4, 80, 8, "float16", "float16", window=40),
    KernelShape(64, 8, 64, 16, "bfloat16", "bfloat16", window=128, has_sinks=True),
)
STEPS = (
    StepCase((0,), ((-1,),), 0),
    StepCase((700, 0, 33), (branching(17), chain(2), chain(1)), 1),
    StepCase((300, 41, 39, 1), (branching(256), (-1, 0, 0), chain(40), chain(1)), 2),
    StepCase((5000,), (branching(16),), 3),
)
# Of all that an engine of these steps meets; each dimension from 1 on.
LARGEST = {"T": 512, "num_blocks": 1024, "B": 8, "B_plus_1": 9, "max_blocks": 640, "W": 8}
PROFILE: Profile = {name: Range(2 if name == "B_plus_1" else 1, size, size) for name, size in LARGEST.items()}


def backend_of(architecture: int) -> Backend:
    """Return whose engines run on a GPU: TensorRT-RTX's where they do, as it needs no container."""
    return "tensorrt_rtx" if architecture in VENDORS["tensorrt_rtx"].compute_capabilities else "tensorrt"


def check_plugin(call: PartCall) -> None:
    """One engine of each shape; steps of all kinds through it."""
    gpu = open_gpu()
    vendor = import_vendor(backend_of(gpu.architecture))
    for done, shape in enumerate(SHAPES):
        if call.is_over:
            call.tell_left_out(len(SHAPES) - done, "shapes")
            return
        kernels = compile_plugin_kernels(shape, (code_architecture(gpu),), kernel_cache(call.output))
        plan = build_attention_plan(vendor, kernels, gpu.architecture, call.output)
        with AttentionEngine(gpu, vendor, plan) as engine:
            configuration = default_configuration(shape, code_architecture(gpu))
            cases = [KernelCase(shape, configuration, step) for step in STEPS]
            differences = [engine.difference(case) for case in cases]
        what = f"{vendor.title}: {shape.dtype}, {shape.num_heads} / {shape.num_kv_heads} heads of {shape.head_size}"
        what += "".join(f", {name} {getattr(shape, name):g}" for name in ("window", "softcap") if getattr(shape, name))
        what += ", sinks" if shape.has_sinks else ""
        note = f"{len(STEPS)} steps"
        call.tell(Finding(what, float(np.max(differences)), "largest difference", tolerance(shape.dtype), note))


def attention_graph(shape: KernelShape) -> onnx.ModelProto:
    """Build a graph of the operator alone, with its function."""
    graph, row, pool = OnnxGraph(), ONNX_TYPES[shape.dtype], ONNX_TYPES[shape.kv_dtype]
    heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    sizes: dict[str, Sequence[int | str]] = {
        "q": ["T", heads, size],
        "k_new": ["T", kv_heads, size],
        "v_new": ["T", kv_heads, size],
        "kv_pool": ["num_blocks", 2, kv_heads, shape.block_size, size],
        "block_table": ["B", "max_blocks"],
        "context_lengths": ["B"],
        "sequence_starts": ["B_plus_1"],
        "packed_mask": ["T", "W"],
        "sinks": [heads],
    }
    types = dict.fromkeys(sizes, TensorProto.INT32) | dict.fromkeys(("q", "k_new", "v_new"), row)
    types |= {"kv_pool": pool, "sinks": TensorProto.FLOAT}
    inputs = [graph.input(name, types[name], own) for name, own in sizes.items()]
    attributes = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    scales: dict[str, Any] = {"scale": float(size**-0.5), "key_scale": 1.0, "value_scale": 1.0}
    out = graph.op("TreeAttention", *inputs, domain=DRAFTLINE, **attributes, **scales)
    graph.output(out, "out", row, ["T", heads * size])
    return graph.model("attention", [load_tree_attention_function()])


def build_attention_plan(vendor: Vendor, kernels: PluginKernels, architecture: int, folder: Path) -> bytes:
    """Build the plan of the operator alone, for a GPU of ``architecture``."""
    model = attention_graph(kernels.shape)
    path = folder / "attention.onnx"
    onnx.save(model, path)
    for_these = choose_architectures(vendor, (architecture,), (architecture,))
    with ExitStack() as opened:
        network = parse_network(vendor, path, (kernels,), lambda line: None, opened)
        return build_plan(network, model, {"steps": PROFILE}, for_these, lambda done, total: None)


class AttentionEngine:
    """A plan of ``build_attention_plan``, ready to run. A context manager."""

    def __init__(self, gpu: Gpu, vendor: Vendor, plan: bytes) -> None:
        from draftline.sessions.tensorrt.network import make_logger

        self._gpu, errors = gpu, list[str]()
        self._logger = make_logger(vendor, lambda line: None, errors)
        self._runtime = vendor.module.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            got = "; ".join(errors) or "no reason"
            raise ArtifactError("engine of the plugin", "loads on this GPU", got, "report it with the GPU")
        self._context = self._engine.create_execution_context()

    def difference(self, case: KernelCase) -> float:
        """Return how far a step's result is from the oracle; NaN where a row was not written."""
        inputs = kernel_inputs(case)
        if not inputs["block_table"].shape[1]:  # a dimension of an engine begins at 1
            inputs["block_table"] = np.full((len(inputs["block_table"]), 1), -1, np.int32)
        out = self.run(inputs, case.shape)
        return float(np.abs(out.astype(np.float64) - expected(case, inputs)).max())

    def run(self, inputs: dict[str, NDArray[Any]], shape: KernelShape) -> NDArray[Any]:
        gpu, dtype = self._gpu, NUMPY_DTYPES[shape.dtype]
        out = np.full((len(inputs["q"]), shape.num_heads * shape.head_size), np.nan, dtype)
        addresses = {name: gpu.upload(array) for name, array in {**inputs, "out": out}.items()}
        for name, array in inputs.items():
            if not self._context.set_input_shape(name, array.shape):
                raise ArtifactError("engine of the plugin", f"takes {name} of this shape", array.shape, "report it")
        for name, address in addresses.items():
            self._context.set_tensor_address(name, address)
        if not self._context.execute_async_v3(STREAM):
            raise ArtifactError("engine of the plugin", "runs on this GPU", "a failed enqueue", "see the part's log")
        gpu.download(addresses["out"], out)
        gpu.free(*addresses.values())
        return out

    def __enter__(self) -> AttentionEngine:
        return self

    def __exit__(self, *error: object) -> None:
        del self._context, self._engine, self._runtime

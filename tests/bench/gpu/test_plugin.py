"""An engine of the plugin alone is built as on a GPU; a fake vendor runs it, with the oracle as its network."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx

from draftline.bench.gpu import page
from draftline.bench.gpu.device import STREAM, Gpu
from draftline.bench.gpu.engines import ENGINES, run_build
from draftline.bench.gpu.plugin import (
    LARGEST,
    SHAPES,
    STEPS,
    AttentionEngine,
    attention_graph,
    backend_of,
    build_attention_plan,
)
from draftline.config import load_pipeline
from draftline.errors import ArtifactError
from draftline.kernels.cases import KernelCase, kernel_inputs, tolerance
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelShape
from draftline.oracle import tree_attention
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from draftline.share import share_path
from tests.bench.gpu.fake_gpu import NUMPY_DTYPES, FakeLibrary
from tests.sessions.tensorrt.plans import fake_kernels, rtx

ROOT = Path(__file__).resolve().parents[3]
SHAPE = SHAPES[3]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plans_are_built_for_the_gpu(shape: KernelShape, tmp_path: Path) -> None:
    plan = build_attention_plan(rtx(), fake_kernels(shape, (89,)), 89, tmp_path)
    assert b"code of tree_attention for sm_89" in plan


def test_steps_are_within_the_profile() -> None:
    for shape in SHAPES:
        configuration = default_configuration(shape, 89)
        for step in STEPS:
            inputs = kernel_inputs(KernelCase(shape, configuration, step))
            graph = attention_graph(shape).graph
            for value in graph.input:
                for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True):
                    assert size <= LARGEST.get(dim.dim_param, dim.dim_value or size), (value.name, dim.dim_param)


class FakeContext:
    """Runs TreeAttention of ``shape`` on the addresses that were set, once all of them are."""

    def __init__(self, library: FakeLibrary, shape: KernelShape) -> None:
        self._library, self._shape = library, shape
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._sizes[name] = tuple(shape)
        return 0 not in shape

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert set(self._addresses) == {*self._sizes, "out"}
        row, pool = NUMPY_DTYPES[self._shape.dtype], NUMPY_DTYPES[self._shape.kv_dtype]
        types = dict.fromkeys(("q", "k_new", "v_new"), row) | {"kv_pool": pool, "sinks": np.float32}
        arrays = {
            name: self._library._array(self._addresses[name], types.get(name, np.int32), *size)
            for name, size in self._sizes.items()
        }
        wide = {name: arrays[name].astype(np.float32) for name in ("q", "k_new", "v_new")}
        scale = float(self._shape.head_size**-0.5)
        limits = {"window": self._shape.window, "softcap": self._shape.softcap}
        out = tree_attention(**{**arrays, **wide}, scale=scale, **limits)
        self._library._array(self._addresses["out"], row, *out.shape)[:] = out
        return True


class FakeVendor:
    """Its module has what a session calls; ``engine`` None: the plan does not load."""

    def __init__(self, engine: Any) -> None:
        self.title = "fake"
        runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
        logger = type("ILogger", (), {})
        self.module = SimpleNamespace(ILogger=logger, Runtime=lambda logger: runtime)


def test_an_engine_that_is_right_agrees() -> None:
    library = FakeLibrary()
    fake = FakeVendor(SimpleNamespace(create_execution_context=lambda: FakeContext(library, SHAPE)))
    with AttentionEngine(Gpu(CudaDriver(library)), fake, b"plan") as engine:  # type: ignore[arg-type]
        for step in STEPS[:3]:
            case = KernelCase(SHAPE, default_configuration(SHAPE, 89), step)
            assert engine.difference(case) <= tolerance(SHAPE.dtype)
    assert library.num_allocations == 0


def test_a_plan_that_does_not_load_is_refused() -> None:
    with pytest.raises(ArtifactError, match="engine of the plugin: loads on this GPU; got no reason"):
        AttentionEngine(Gpu(CudaDriver(FakeLibrary())), FakeVendor(None), b"plan")  # type: ignore[arg-type]


def test_the_vendor_has_the_methods_that_are_called() -> None:
    """With the parameters that the fake has."""
    for name in ("set_input_shape", "set_tensor_address", "execute_async_v3"):
        signatures = re.findall(rf"{name}\(([^)]*)\)", str(getattr(tensorrt_rtx.IExecutionContext, name).__doc__))
        own = getattr(FakeContext, name).__code__.co_varnames[1 : getattr(FakeContext, name).__code__.co_argcount]
        assert ["self", *own] in [re.findall(r"(\w+): ", signature) for signature in signatures], signatures
    assert hasattr(tensorrt_rtx.ICudaEngine, "create_execution_context")


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
def test_engines_are_of_a_vendor_that_serves_the_gpu(architecture: int) -> None:
    backend = backend_of(architecture)
    assert backend == ("tensorrt" if architecture in (90, 100) else "tensorrt_rtx")
    for engine in ENGINES:
        capabilities = [] if backend == "tensorrt" else [architecture]
        pipeline = load_pipeline(share_path("pipelines") / engine.pipeline, engine.overrides(backend, architecture))
        assert (pipeline.engine.backend, list(pipeline.engine.compute_capabilities)) == (backend, capabilities)
        assert pipeline.target.dtype == pipeline.kv_cache.dtype == engine.dtype


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    error = run_build(share_path("pipelines") / "smollm2-135m-rtx.yaml", tmp_path / "build", ["target.dtype=float31"])
    assert "target.dtype" in error


def test_the_page_shows_the_last_run_or_says_that_there_was_none() -> None:
    report = page.load_check(page.NUMBERS) if page.NUMBERS.exists() else None
    text = page.PAGE.read_text(encoding="utf-8")
    assert text == page.fill_page(text, report)
    assert (report is None) == (page.NOT_RUN in text)

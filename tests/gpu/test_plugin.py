"""The plugin in engines of the vendor that serves this GPU, against the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.bench.gpu.device import open_gpu
from draftline.bench.gpu.kernels import code_architecture
from draftline.bench.gpu.plugin import SHAPES, STEPS, AttentionEngine, backend_of, build_attention_plan
from draftline.kernels.cases import KernelCase, tolerance
from draftline.kernels.configurations import default_configuration
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.plugin_kernels import compile_plugin_kernels
from draftline.sessions.tensorrt.vendor import import_vendor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_plugin_in_an_engine_agrees_with_the_oracle(shape: KernelShape, tmp_path: Path) -> None:
    gpu = open_gpu()
    vendor = import_vendor(backend_of(gpu.architecture))
    architecture = code_architecture(gpu)
    kernels = compile_plugin_kernels(shape, (architecture,), tmp_path)
    plan = build_attention_plan(vendor, kernels, gpu.architecture, tmp_path)
    with AttentionEngine(gpu, vendor, plan) as engine:
        for step in STEPS:
            case = KernelCase(shape, default_configuration(shape, architecture), step)
            assert np.isfinite(found := engine.difference(case))
            assert found <= tolerance(shape.dtype)

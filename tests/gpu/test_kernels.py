"""Compiled kernels on a GPU against the oracle; ``scripts/gpu_check`` runs hundreds of cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.bench.gpu.device import Gpu, open_gpu
from draftline.bench.gpu.kernels import code_architecture, kernel_difference, run_attention, run_commit
from draftline.kernels.cases import BORDERS, kernel_inputs, make_case, tolerance
from draftline.kernels.commit_cases import count_wrong, make_commit_case
from draftline.kernels.compilation import compile_kernels
from draftline.kernels.configurations import default_configuration
from draftline.sessions.tensorrt.plugin_kernels import ATTENTION_KERNELS, PluginKernels


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return open_gpu()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize("number", range(len(BORDERS) + 6))
def test_kernels_agree_with_the_oracle(gpu: Gpu, cache: Path, number: int, is_default: bool) -> None:
    case, architecture = make_case(number), code_architecture(gpu)
    configuration = default_configuration(case.shape, architecture) if is_default else case.configuration
    compiled = compile_kernels(case.shape, (architecture,), cache, configuration)
    assert kernel_difference(gpu, case, compiled) <= tolerance(case.shape.dtype)


@pytest.mark.parametrize("number", range(7))
def test_commit_writes_the_nearest_numbers(gpu: Gpu, cache: Path, number: int) -> None:
    case = make_commit_case(number)
    compiled = compile_kernels(case.shape, (code_architecture(gpu),), cache)
    (kernel,) = (kernel for kernel in compiled if kernel.name == "commit_rows")
    assert count_wrong(case, run_commit(gpu, kernel, case.shape, case.arrays())) == 0


def test_the_same_call_gives_the_same_bits(gpu: Gpu, cache: Path) -> None:
    case = make_case(1)
    compiled = compile_kernels(case.shape, (code_architecture(gpu),), cache, case.configuration)
    kernels = PluginKernels(case.shape, tuple(kernel for kernel in compiled if kernel.name in ATTENTION_KERNELS))
    inputs = kernel_inputs(case)
    first, second = (run_attention(gpu, kernels, inputs, case) for _ in range(2))
    np.testing.assert_array_equal(first.view(np.uint16), second.view(np.uint16))

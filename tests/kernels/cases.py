"""Cases of the GPU kernels, run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.cases import KernelCase, expected, kernel_inputs, make_case, tolerance
from tests.kernels.interpreter import interpreted, run_attention


def run(case: KernelCase, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    return interpreted(
        run_attention, case.shape, case.configuration, inputs, (case.scale, case.key_scale, case.value_scale)
    )


def difference(number: int) -> tuple[float, float]:
    """Return how far the kernels are from the oracle in case ``number``, and how far they may be."""
    case = make_case(number)
    inputs = kernel_inputs(case)
    return float(np.abs(run(case, inputs) - expected(case, inputs)).max()), tolerance(case.shape.dtype)

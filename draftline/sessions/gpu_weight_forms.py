"""The forms in which TensorRT keeps rounded matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.errors import BuildError
from draftline.gpu_quantization import (
    SIGNED_BLOCK,
    dequantize_float8,
    dequantize_int4_signed,
    quantize_float8,
    quantize_int4_signed,
)

INT4_SIGNED = "int4 signed"  # engine.weights_dtype int4, where that of the CPU has other blocks
FLOAT8 = "float8"
STORED_AS = {"int4": INT4_SIGNED, "float8": FLOAT8}  # engine.weights_dtype where it is not that of the network


class GpuForm(NamedTuple):
    """What the names of codes and scales end in, inputs of a byte of codes and of a scale (0 = all), and how a matrix
    is rounded and widened."""

    suffixes: tuple[str, str]
    inputs_of_byte: int
    inputs_of_scale: int
    quantize: Callable[[NDArray[Any]], tuple[NDArray[np.uint8], NDArray[Any]]]
    dequantize: Callable[[NDArray[np.uint8], NDArray[Any]], NDArray[np.float32]]

    def rounded(self, weight: NDArray[Any]) -> NDArray[np.float32]:
        """Return the matrix that this form holds of ``weight``."""
        return self.dequantize(*self.quantize(weight))

    def shapes(self, num_outputs: int, num_inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the codes' bytes and of the scales."""
        scales = (num_outputs, num_inputs // self.inputs_of_scale) if self.inputs_of_scale else (num_outputs,)
        return (num_outputs, num_inputs // self.inputs_of_byte), scales

    def check_inputs(self, name: str, num_inputs: int) -> None:
        """Raise BuildError for a matrix whose inputs are no multiple of those that share a scale."""
        if self.inputs_of_scale and num_inputs % self.inputs_of_scale:
            rule = f"int4 weights of a GPU have a multiple of {self.inputs_of_scale} inputs"
            raise BuildError(name, rule, num_inputs, "set engine.weights_dtype to target.dtype or float8")


GPU_FORMS = {
    INT4_SIGNED: GpuForm(
        ("int4_signed", "scale_signed"), 2, SIGNED_BLOCK, quantize_int4_signed, dequantize_int4_signed
    ),
    FLOAT8: GpuForm(("float8", "scale_float8"), 1, 0, quantize_float8, dequantize_float8),
}

"""Matrix products and lookups of every dtype of weights, run by ONNX Runtime, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.linear import Linear
from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import PORTABLE, Operators
from draftline.quantization import (
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)
from draftline.sessions.native_kernels import find_library
from tests.test_quantization import dequantize_int4, dequantize_int8, dequantize_tiles

TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.uint8): TensorProto.UINT8}


def write_tensors(directory: Path, tensors: dict[str, NDArray[Any]]) -> dict[str, TensorLocation]:
    """One file, at offsets of no alignment, as in a safetensors file."""
    locations, offset = {}, 3
    with (directory / "weights.bin").open("wb") as file:
        file.write(b"???")
        for name, tensor in tensors.items():
            file.write(tensor.tobytes())
            locations[name] = TensorLocation("weights.bin", offset, tensor.nbytes, TYPES[tensor.dtype], tensor.shape)
            offset += tensor.nbytes
    return locations


def quantized(weight: NDArray[np.float32], dtype: str) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """Tensors of a matrix in a dtype, and what they stand for."""
    if dtype == "float32":
        return {"m.weight": weight}, weight.astype(np.float64)
    if dtype == "int8":
        codes, scales = quantize_int8_blocks(weight)
        restored = dequantize_int8(codes, scales)
        return {"m.weight_int8": codes, "m.weight_scale": scales}, restored[:, : weight.shape[1]]
    if dtype.endswith("tiles"):
        quantize, names = {
            "int8_tiles": (quantize_int8_tiles, ("int8", "scale")),
            "int4_tiles": (quantize_int4_tiles, ("int4", "scale", "zero")),
        }[dtype]
        parts = quantize(weight)
        restored = dequantize_tiles(*parts)[: len(weight), : weight.shape[1]]
        return {f"m.weight_{name}_tiles": part for name, part in zip(names, parts, strict=True)}, restored
    packed, scales, zeros = quantize_int4_blocks(weight)
    restored = dequantize_int4(packed, scales, zeros)
    return {"m.weight_int4": packed, "m.weight_scale": scales, "m.weight_zero": zeros}, restored[:, : weight.shape[1]]


def run(graph: OnnxGraph, directory: Path, **feeds: NDArray[Any]) -> NDArray[np.float32]:
    onnx.save(graph.model("linear", []), directory / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if "draftline" in {
        node.domain for node in onnx.load(directory / "model.onnx", load_external_data=False).graph.node
    }:
        options.register_custom_ops_library(str(find_library()))
    path = str(directory / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    out: NDArray[np.float32] = session.run(None, feeds)[0]
    return out


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 96), (72, 267), (20, 5), (31, 1), (200, 96)])
@pytest.mark.parametrize("dtype", ["float32", "native float32", "int8", "int4", "int8_tiles", "int4_tiles"])
@pytest.mark.parametrize("bias", [False, True])
def test_product(tmp_path: Path, dtype: str, bias: bool, num_inputs: int, num_outputs: int) -> None:
    random = np.random.default_rng(0)
    weight = (random.standard_normal((num_outputs, num_inputs)) / num_inputs**0.5).astype(np.float32)
    x = random.standard_normal((7, num_inputs)).astype(np.float32)
    operators: Operators = NATIVE if dtype == "native float32" else PORTABLE
    tensors, restored = quantized(weight, dtype.removeprefix("native "))
    offsets = random.standard_normal(num_outputs).astype(np.float32)
    locations = write_tensors(tmp_path, tensors | {"m.bias": offsets})
    graph = OnnxGraph()
    value = graph.input("x", TensorProto.FLOAT, ["T", num_inputs])
    y = Linear(graph, locations, operators).emit(value, "m", num_inputs, num_outputs, bias=bias)
    graph.output(y, "y", TensorProto.FLOAT, ["T", num_outputs])
    expected = x @ restored.T + (offsets if bias else 0)
    # Quantised products round activations to 8 bits by block as well: half a step of the largest of a block, 1.5 % of
    # it over a row of products of size 1 / sqrt(n). A transposed, shifted or misread block is off by order 1.
    tolerance = 1e-5 if dtype.endswith("float32") else 0.05
    np.testing.assert_allclose(run(graph, tmp_path, x=x), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("hidden_size", [64, 72, 20, 144])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int8_tiles"])
def test_lookup(tmp_path: Path, dtype: str, hidden_size: int) -> None:
    weight = np.random.default_rng(1).standard_normal((267, hidden_size)).astype(np.float32)
    tensors, restored = quantized(weight, dtype)
    graph = OnnxGraph()
    ids = graph.input("ids", TensorProto.INT32, ["T"])
    rows = Linear(graph, write_tensors(tmp_path, tensors), PORTABLE).embed(ids, "m", hidden_size)
    graph.output(rows, "rows", TensorProto.FLOAT, ["T", hidden_size])
    chosen = np.array([0, 266, 5, 5, 130], np.int32)
    np.testing.assert_allclose(run(graph, tmp_path, ids=chosen), restored[chosen], rtol=1e-6, atol=0)

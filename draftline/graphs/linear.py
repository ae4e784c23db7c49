"""Matrix products of the network, one way per ``engine.weights_dtype``.

The row law: the result of a row never depends on the other rows of the step, to the last bit. Hence int8 quantises
activations row by row (a scale per tensor would let neighbours move a row's logits), and every product goes through
kernels whose order of summation does not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from draftline.graphs.onnx_graph import MICROSOFT, OnnxGraph, TensorLocation
from draftline.quantization import INT4_BLOCK

WEIGHTS_DTYPES = ("float32", "int8", "int4")


class Linear:
    """Emit ``y = x W^T + b`` for weights in one dtype.

    ``weights`` maps tensor names to where they lie: ``NAME.weight [out, in]`` for float32; ``NAME.weight_int8 [in, out]`` with
    ``NAME.weight_scale [out]``; ``NAME.weight_int4`` with ``NAME.weight_scale``, ``NAME.weight_zero`` in ``MatMulNBits``' layout.
    """

    def __init__(self, graph: OnnxGraph, weights: Mapping[str, TensorLocation], weights_dtype: str) -> None:
        assert weights_dtype in WEIGHTS_DTYPES
        self._graph, self._weights, self._dtype = graph, weights, weights_dtype
        self._quantized: dict[str, tuple[str, str]] = {}

    def _weight(self, name: str) -> str:
        return self._graph.external(name, self._weights[name])

    def emit(self, x: str, name: str, num_inputs: int, num_outputs: int, bias: bool = False) -> str:
        """Append the product of ``x [T, num_inputs]``; returns ``[T, num_outputs] float32``."""
        if f"{name}.weight_int8" in self._weights:
            y = self._int8(x, name)
        elif f"{name}.weight_int4" in self._weights:
            y = self._int4(x, name, num_inputs, num_outputs)
        else:
            y = self._graph.op("Gemm", x, self._weight(f"{name}.weight"), transB=1, name=name)
        return self._graph.op("Add", y, self._weight(f"{name}.bias")) if bias else y

    def embed(self, ids: str, name: str) -> str:
        """Append the lookup of rows ``ids [T]`` in the embedding ``name``; returns ``[T, hidden] float32``."""
        if f"{name}.weight" in self._weights:
            return self._graph.op("Gather", self._weight(f"{name}.weight"), ids, name=name)
        rows = self._graph.op("Gather", self._weight(f"{name}.weight_int8"), ids, name=name)
        scales = self._graph.op("Gather", self._weight(f"{name}.weight_scale"), ids)
        column = self._graph.op("Unsqueeze", scales, self._graph.constant([1]))
        return self._graph.op("Mul", self._graph.op("Cast", rows, to=TensorProto.FLOAT), column)

    def _int8(self, x: str, name: str) -> str:
        graph = self._graph
        if x not in self._quantized:
            self._quantized[x] = self._quantize_rows(x)
        values, scale_column = self._quantized[x]
        product = graph.op(
            "MatMulIntegerToFloat",
            values,
            self._weight(f"{name}.weight_int8"),
            graph.constant(1.0, "one"),
            self._weight(f"{name}.weight_scale"),
            self._zero_point(),
            domain=MICROSOFT,
            name=name,
        )
        return graph.op("Mul", product, scale_column)

    def _zero_point(self) -> str:
        return self._graph.op("Cast", self._graph.constant(128), to=TensorProto.UINT8)

    def _quantize_rows(self, x: str) -> tuple[str, str]:
        """Append x -> uint8 around 128 with one scale per row; returns (values [T, in] uint8, scales [T, 1])."""
        graph = self._graph
        largest = graph.op("ReduceMax", graph.op("Abs", x), graph.constant([-1]), keepdims=1)
        scale_column = graph.op("Mul", graph.op("Max", largest, graph.constant(1e-30)), graph.constant(1 / 127))
        scales = graph.op("Squeeze", scale_column, graph.constant([1]))
        zero_points = graph.op("Expand", self._zero_point(), graph.op("Shape", scales))
        return graph.op("QuantizeLinear", x, scales, zero_points, axis=0), scale_column

    def _int4(self, x: str, name: str, num_inputs: int, num_outputs: int) -> str:
        return self._graph.op(
            "MatMulNBits",
            x,
            self._weight(f"{name}.weight_int4"),
            self._weight(f"{name}.weight_scale"),
            self._weight(f"{name}.weight_zero"),
            domain=MICROSOFT,
            name=name,
            K=num_inputs,
            N=num_outputs,
            bits=4,
            block_size=INT4_BLOCK,
            accuracy_level=4,  # activations in int8 by block of a row: fastest, and the row law holds
        )

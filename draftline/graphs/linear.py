"""Matrix products of the network, one way per ``engine.weights_dtype``.

The row law: the result of a row never depends on the other rows of the step, to the last bit. Hence quantised products
quantise activations by block of a row (a scale per tensor would let neighbours move a row's logits), and every product
goes through kernels whose order of summation does not depend on the number of rows. The native ones hold it everywhere,
ONNX Runtime's on x86-64 with AVX-512 and with AVX2; without AVX2, its quantised products vary with the number of rows
and threads, so there the law holds for float32 alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from draftline.gpu_quantization import SIGNED_BLOCK
from draftline.graphs.onnx_graph import DRAFTLINE, MICROSOFT, OnnxGraph, TensorLocation
from draftline.graphs.operators import Operators
from draftline.quantization import BLOCK


class Linear:
    """Emit ``y = x W^T + b``. The names in ``weights`` decide the dtype of a matrix NAME.

    float32: ``NAME.weight [out, in]``, multiplied by the operators' ``product``. int8 and int4: ``NAME.weight_int8`` or
    ``NAME.weight_int4`` in the layout of ``MatMulNBits`` with ``NAME.weight_scale`` (and ``NAME.weight_zero`` for
    int4), or ``NAME.weight_int8_tiles`` and so on in that of the native operators, see ``draftline.quantization``.
    ``NAME.weight_int4_signed`` with ``NAME.weight_scale_signed`` and ``NAME.weight_float8`` with
    ``NAME.weight_scale_float8`` are TensorRT's, see ``draftline.gpu_quantization``, and go before ``NAME.weight``.
    """

    def __init__(self, graph: OnnxGraph, weights: Mapping[str, TensorLocation], operators: Operators) -> None:
        self._graph, self._weights, self._operators = graph, weights, operators

    def _weight(self, name: str) -> str:
        return self._graph.external(name, self._weights[name])

    def emit(self, x: str, name: str, num_inputs: int, num_outputs: int, bias: bool = False) -> str:
        """Append the product of ``x [T, num_inputs]``; returns ``[T, num_outputs] float32``."""
        if f"{name}.weight_int4_signed" in self._weights or f"{name}.weight_float8" in self._weights:
            y = self._operators.product(self._graph, x, self._dequantized(name), name)
        elif f"{name}.weight" in self._weights:
            y = self._operators.product(self._graph, x, self._weight(f"{name}.weight"), name)
        else:
            y = self._quantized(x, name, num_inputs, num_outputs)
        return self._graph.op("Add", y, self._weight(f"{name}.bias")) if bias else y

    def emit_float32(self, x: str, name: str, bias: bool = False) -> str:
        """Append the product of ``x [T, num_inputs]`` with a matrix as the checkpoint has it, all in float32."""
        wide = self._graph.cast(x, self._operators.onnx_type, TensorProto.FLOAT)
        y = self._operators.product(self._graph, wide, self._float32(f"{name}.weight"), name)
        return self._graph.op("Add", y, self._float32(f"{name}.bias")) if bias else y

    def _float32(self, name: str) -> str:
        return self._graph.cast(self._weight(name), self._weights[name].onnx_type, TensorProto.FLOAT)

    def biases(self, name: str) -> str:
        """Return the biases ``[matrices, num_outputs]`` of matrices that rows choose among."""
        return self._weight(f"{name}.bias")

    def chosen_biases(self, name: str, ids: str) -> str:
        """Append ``[N, num_outputs]``: the biases of the matrices ``ids [N]``."""
        return self._graph.op("Gather", self.biases(name), ids)

    def emit_chosen(self, x: str, name: str, ids: str, num_inputs: int, num_outputs: int) -> str:
        """Append products with matrices that rows choose, for operators that multiply so.

        ``x [R, num_inputs]``, ``ids [N] int64`` with N a multiple of R -> ``[N, num_outputs] float32``: row n is that
        of row ``n // (N / R)`` of x and matrix ``ids[n]``.
        """
        if f"{name}.weight" in self._weights:
            return self._graph.op("ChosenLinear", x, ids, self._weight(f"{name}.weight"), domain=DRAFTLINE, name=name)
        return self._native("ChosenQuantizedMatMul", (x, ids), name, num_inputs, num_outputs)

    def embed(self, ids: str, name: str, hidden_size: int) -> str:
        """Append the lookup of rows ``ids [T]`` in the embedding ``name``; returns ``[T, hidden_size] float32``."""
        if f"{name}.weight" in self._weights:
            return self._graph.op("Gather", self._weight(f"{name}.weight"), ids, name=name)
        if f"{name}.weight_int8_tiles" in self._weights:
            tiles = self._weight(f"{name}.weight_int8_tiles"), self._weight(f"{name}.weight_scale_tiles")
            return self._graph.op(
                "QuantizedEmbedding", *tiles, ids, domain=DRAFTLINE, name=name, num_inputs=hidden_size
            )
        codes = self._weights[f"{name}.weight_int8"]
        rows, num_blocks, block = codes.shape
        table = self._graph.external(f"{name}.weight_int8_2d", codes._replace(shape=(rows, num_blocks * block)))
        looked_up = self._graph.op(
            "GatherBlockQuantized",
            table,
            ids,
            self._weight(f"{name}.weight_scale"),
            domain=MICROSOFT,
            name=name,
            bits=8,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )
        if num_blocks * block == hidden_size:
            return looked_up
        ends = [self._graph.constant([value]) for value in (0, hidden_size, 1)]
        return self._graph.op("Slice", looked_up, *ends)  # without the padding of the last block

    def _dequantized(self, name: str) -> str:
        """Append the matrix ``[out, in]`` of codes times scales, which TensorRT fuses into the product."""
        if f"{name}.weight_float8" in self._weights:
            numbers = self._weights[f"{name}.weight_float8"]._replace(onnx_type=TensorProto.FLOAT8E4M3FN)
            scales = self._weight(f"{name}.weight_scale_float8")
            return self._graph.op(
                "DequantizeLinear", self._graph.external(f"{name}.weight_float8", numbers), scales, axis=0
            )
        packed = self._weights[f"{name}.weight_int4_signed"]
        codes = packed._replace(onnx_type=TensorProto.INT4, shape=(packed.shape[0], 2 * packed.shape[1]))
        inputs = self._graph.external(f"{name}.weight_int4_signed", codes), self._weight(f"{name}.weight_scale_signed")
        return self._graph.op("DequantizeLinear", *inputs, axis=1, block_size=SIGNED_BLOCK)

    def _quantized(self, x: str, name: str, num_inputs: int, num_outputs: int) -> str:
        if f"{name}.weight_scale_tiles" in self._weights:
            return self._native("QuantizedMatMul", (x,), name, num_inputs, num_outputs)
        bits = 8 if f"{name}.weight_int8" in self._weights else 4
        inputs = [self._weight(f"{name}.weight_int{bits}"), self._weight(f"{name}.weight_scale")]
        if bits == 4:
            inputs.append(self._weight(f"{name}.weight_zero"))
        return self._graph.op(
            "MatMulNBits",
            x,
            *inputs,
            domain=MICROSOFT,
            name=name,
            K=num_inputs,
            N=num_outputs,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=4,  # activations in int8 by block of a row: fastest, and the row law holds
        )

    def _native(self, op: str, rows: tuple[str, ...], name: str, num_inputs: int, num_outputs: int) -> str:
        bits = 8 if f"{name}.weight_int8_tiles" in self._weights else 4
        inputs = [self._weight(f"{name}.weight_{suffix}_tiles") for suffix in (f"int{bits}", "scale")]
        if bits == 4:
            inputs.append(self._weight(f"{name}.weight_zero_tiles"))
        return self._graph.op(
            op,
            *rows,
            *inputs,
            domain=DRAFTLINE,
            name=name,
            bits=bits,
            num_inputs=num_inputs,
            num_outputs=num_outputs,
        )

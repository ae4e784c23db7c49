"""``Operators`` in what TensorRT and TensorRT-RTX parse: ONNX's own, the rows of one dtype, TreeAttention a plugin.

The sampler stays outside: its rules ask for the whole vocabulary in order (TensorRT's TopK ends at 3840) and for the
bits of one order of summation, else an engine draws another text from the same seed than its neighbour. The network
ends in logits, for a sampler that holds these laws, and in the greedy token of each row.
"""

from __future__ import annotations

from typing import Literal

from onnx import TensorProto

from draftline.graphs.candidates import emit_candidates
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import HeadNorms, Heads, PortableOperators, Rotary

NetworkDtype = Literal["float32", "float16", "bfloat16"]
NETWORK_TYPES: dict[NetworkDtype, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}


class TensorRtOperators(PortableOperators):
    """Implements ``Operators``. Rows have the dtype of the weights; queries and keys are rotated in float32."""

    def __init__(self, dtype: NetworkDtype) -> None:
        self.onnx_type = NETWORK_TYPES[dtype]

    def rotated_heads(
        self, graph: OnnxGraph, qkv: str, heads: Heads, rotary: Rotary, norms: HeadNorms | None, epsilon: float
    ) -> tuple[str, str, str]:
        num_heads, num_kv_heads, size = heads
        qkv_heads = graph.op("Reshape", qkv, graph.constant([-1, num_heads + 2 * num_kv_heads, size]))
        sizes = graph.constant([num_heads, num_kv_heads, num_kv_heads])
        q, k, v = graph.ops("Split", qkv_heads, sizes, outputs=3, axis=1)
        cosines, sines = (  # [T, 1, size / 2]: the same for every head of a row
            graph.op("Unsqueeze", graph.op("Gather", table, rotary.position_ids), graph.constant([1]))
            for table in (rotary.cosines, rotary.sines)
        )

        def rotate(x: str, norm: str | None) -> str:
            if norm is not None:
                x = graph.op("RMSNormalization", x, norm, epsilon=epsilon)
            rest = []
            if rotary.size < size:
                x, *rest = graph.ops("Split", x, graph.constant([rotary.size, size - rotary.size]), outputs=2, axis=2)
            wide = graph.cast(x, self.onnx_type, TensorProto.FLOAT)
            rotated = self._rotate_halves(graph, wide, cosines, sines, rotary.size // 2)
            rotated = graph.cast(rotated, TensorProto.FLOAT, self.onnx_type)
            return graph.op("Concat", rotated, *rest, axis=2) if rest else rotated

        return rotate(q, norms.q if norms else None), rotate(k, norms.k if norms else None), v

    def output_drawn(self, graph: OnnxGraph, logits: str, vocab_size: int, with_edits: bool) -> None:
        """Add the output ``greedy_ids [R] int64``: the most probable token of a row, of equal ones any.

        -1 in a row with a logit that is not finite. Edits are for who samples from the logits.
        """
        not_finite = graph.op("Or", graph.op("IsNaN", logits), graph.op("IsInf", logits))
        flags = graph.op("Cast", not_finite, to=TensorProto.INT32)
        any_flag = graph.op("ReduceMax", flags, graph.constant([1]), keepdims=0)
        is_broken = graph.op("Cast", any_flag, to=TensorProto.BOOL)
        greedy = graph.op("Where", is_broken, graph.constant(-1), graph.op("ArgMax", logits, axis=1, keepdims=0))
        graph.output(greedy, "greedy_ids", TensorProto.INT64, ["R"])

    def candidates(self, graph: OnnxGraph, logits: str, num_candidates: int) -> tuple[str, str]:
        return emit_candidates(graph, logits, num_candidates)

    def _rotate_halves(self, graph: OnnxGraph, x: str, cosines: str, sines: str, half: int) -> str:
        """Hugging Face's convention: element i turns with element i + half. ``x [T, heads, 2 half] float32``."""
        first, second = graph.ops("Split", x, graph.constant([half, half]), outputs=2, axis=2)

        def product(a: str, b: str) -> str:
            return graph.op("Mul", a, b)

        return graph.op(
            "Concat",
            graph.op("Sub", product(first, cosines), product(second, sines)),
            graph.op("Add", product(first, sines), product(second, cosines)),
            axis=2,
        )

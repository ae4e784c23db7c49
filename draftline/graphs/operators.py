"""The parts of a network that engines compute in different ways: in ONNX's operators, or in the CPU's native ones.

A network emits itself through ``Operators``; ``PORTABLE`` spells its parts in ONNX and ``NATIVE``
(``draftline.graphs.native_operators``) in the operators of ``plugins/``, which take fewer passes over memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import onnx
from onnx import TensorProto

from draftline.graphs.candidates import emit_candidates
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.sampler import EditInputs, emit_edited_sampler, emit_sampler, output_sampled_ids
from draftline.graphs.step_inputs import SamplingInputs
from draftline.graphs.tree_attention import load_tree_attention_function

GELU_SLOPE, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # of Hendrycks and Gimpel (arXiv 1606.08415)


class Heads(NamedTuple):
    """H query heads and K key/value heads of size D."""

    num_heads: int
    num_kv_heads: int
    head_size: int


class Rotary(NamedTuple):
    """Names of the tables ``[positions, size / 2]`` and of ``position_ids [T] int32``; ``size``: elements of a head
    that are rotated, its first ones."""

    cosines: str
    sines: str
    position_ids: str
    size: int


class HeadNorms(NamedTuple):
    """Names of the RMS norms' weights ``[D]`` that queries and keys pass through before they are rotated."""

    q: str
    k: str


class Operators(Protocol):
    """``functions``: model-local functions that a graph of these operators needs. ``onnx_type``: the ``TensorProto``
    type of all rows of a network, the logits excepted, which are float32. ``multiplies_chosen``: whether there are
    products of rows with matrices that each chooses (``Linear.emit_chosen``)."""

    onnx_type: int
    multiplies_chosen: bool

    def functions(self) -> list[onnx.FunctionProto]: ...

    def product(self, graph: OnnxGraph, x: str, weight: str, name: str) -> str:
        """Append the node ``name``: ``x [T, in]`` times the transpose of ``weight [out, in]``, all ``onnx_type``."""
        ...

    def add_norm(self, graph: OnnxGraph, x: str, y: str, weight: str, epsilon: float) -> tuple[str, str]:
        """Append ``x + y`` and its RMS norm; returns both, ``[T, hidden_size]`` each."""
        ...

    def rotated_heads(
        self, graph: OnnxGraph, qkv: str, heads: Heads, rotary: Rotary, norms: HeadNorms | None, epsilon: float
    ) -> tuple[str, str, str]:
        """Append the split of ``qkv [T, (H + 2 K) D]`` into heads, q and k rotated; ``epsilon`` is that of the norms.

        Returns ``q [T, H, D]``, ``k`` and ``v [T, K, D]``.
        """
        ...

    def silu_gate(self, graph: OnnxGraph, both: str, size: int, up_first: bool = False) -> str:
        """Append ``silu(both[:, :size]) * both[:, size:]``; ``up_first``: silu is of the second half."""
        ...

    def gelu_gate(self, graph: OnnxGraph, both: str, size: int) -> str:
        """Append ``gelu(both[:, :size]) * both[:, size:]``; of GELU its approximation by tanh."""
        ...

    def output_drawn(self, graph: OnnxGraph, logits: str, vocab_size: int, with_edits: bool) -> None:
        """Add the inputs that say how tokens are drawn, the edits' where there are some, and the output of the draw."""
        ...

    def candidates(self, graph: OnnxGraph, logits: str, num_candidates: int) -> tuple[str, str]:
        """Append the choice of the most probable tokens, the most probable first; of equal ones the lower id first.

        Returns ``ids [R, num_candidates] int64`` and ``log_probs [R, num_candidates] float32``, over all V. In a row
        without a distribution ids are any, and log-probabilities -inf (native) or NaN (portable).
        """
        ...


class SamplingOperators(Operators, Protocol):
    """Operators that have a sampler: graphs put out ``sampled_ids``."""

    def sample(
        self, graph: OnnxGraph, logits: str, sampling: SamplingInputs, edits: EditInputs | None, vocab_size: int
    ) -> str:
        """Append the edits of ``logits [R, V]`` and the draw of a token a row; returns ``[R] int64``.

        -1 where the edited row is not finite or -inf throughout, or not finite anywhere.
        """
        ...


class PortableOperators:
    """Implements ``Operators`` in ONNX's own."""

    onnx_type: int = TensorProto.FLOAT
    multiplies_chosen = False

    def functions(self) -> list[onnx.FunctionProto]:
        return [load_tree_attention_function()]

    def product(self, graph: OnnxGraph, x: str, weight: str, name: str) -> str:
        return graph.op("Gemm", x, weight, transB=1, name=name)

    def add_norm(self, graph: OnnxGraph, x: str, y: str, weight: str, epsilon: float) -> tuple[str, str]:
        total = graph.op("Add", x, y)
        return total, graph.op("RMSNormalization", total, weight, epsilon=epsilon)

    def rotated_heads(
        self, graph: OnnxGraph, qkv: str, heads: Heads, rotary: Rotary, norms: HeadNorms | None, epsilon: float
    ) -> tuple[str, str, str]:
        num_heads, num_kv_heads, size = heads
        # A row is a sequence of its own to RotaryEmbedding, which takes no more rows of one than its tables have.
        qkv_3d = graph.op("Unsqueeze", qkv, graph.constant([1]))
        wide_positions = graph.op("Cast", rotary.position_ids, to=TensorProto.INT64)
        position_column = graph.op("Unsqueeze", wide_positions, graph.constant([1]))
        sizes = graph.constant([num_heads * size, num_kv_heads * size, num_kv_heads * size])
        q, k, v = graph.ops("Split", qkv_3d, sizes, outputs=3, axis=2)

        def by_head(x: str, count: int) -> str:
            return graph.op("Reshape", x, graph.constant([-1, count, size]))

        def rotate(x: str, count: int, norm: str | None) -> str:
            if norm is not None:
                normed = graph.op("RMSNormalization", by_head(x, count), norm, epsilon=epsilon)
                x = graph.op("Reshape", normed, graph.constant([-1, 1, count * size]))
            tables = rotary.cosines, rotary.sines, position_column
            partial: dict[str, Any] = {} if rotary.size == size else {"rotary_embedding_dim": rotary.size}
            return by_head(graph.op("RotaryEmbedding", x, *tables, num_heads=count, **partial), count)

        return (
            rotate(q, num_heads, norms.q if norms else None),
            rotate(k, num_kv_heads, norms.k if norms else None),
            by_head(v, num_kv_heads),
        )

    def silu_gate(self, graph: OnnxGraph, both: str, size: int, up_first: bool = False) -> str:
        halves = graph.ops("Split", both, graph.constant([size, size]), outputs=2, axis=1)
        gate, up = reversed(halves) if up_first else halves
        return graph.op("Mul", graph.op("Mul", gate, graph.op("Sigmoid", gate)), up)

    def gelu_gate(self, graph: OnnxGraph, both: str, size: int) -> str:
        """x (1 + tanh(u)) / 2 is x sigmoid(2 u), where u = sqrt(2 / pi) (x + 0.044715 x^3)."""
        gate, up = graph.ops("Split", both, graph.constant([size, size]), outputs=2, axis=1)

        def number(value: float) -> str:
            return graph.cast(graph.constant(value), TensorProto.FLOAT, self.onnx_type)

        square = graph.op("Mul", gate, gate)
        inner = graph.op("Add", graph.op("Mul", square, number(GELU_SLOPE * GELU_CUBIC)), number(GELU_SLOPE))
        sigmoid = graph.op("Sigmoid", graph.op("Mul", gate, inner))
        return graph.op("Mul", graph.op("Mul", gate, sigmoid), up)

    def sample(
        self, graph: OnnxGraph, logits: str, sampling: SamplingInputs, edits: EditInputs | None, vocab_size: int
    ) -> str:
        temperature, top_k, top_p, uniform = sampling
        parameters = temperature, graph.op("Cast", top_k, to=TensorProto.INT64), top_p, uniform, vocab_size
        if edits is None:
            return emit_sampler(graph, logits, *parameters)
        return emit_edited_sampler(graph, logits, edits, *parameters)

    def output_drawn(self, graph: OnnxGraph, logits: str, vocab_size: int, with_edits: bool) -> None:
        output_sampled_ids(graph, self.sample, logits, vocab_size, with_edits)

    def candidates(self, graph: OnnxGraph, logits: str, num_candidates: int) -> tuple[str, str]:
        return emit_candidates(graph, logits, num_candidates)


PORTABLE = PortableOperators()

"""The mixture-of-experts MLP: a row goes through the experts that a router gives most to.

Where operators multiply with chosen matrices, a row costs those it chose. Elsewhere all experts are one MLP as wide as
all of them, whose rows are zeros for what they did not choose: two products, for whatever a matrix is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from draftline.checkpoints.config import GATE_SLOPE, Experts
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import Operators


class Choice(NamedTuple):
    """The experts of each row, ``ids [T, k] int64``, and ``weights [T, k] float32`` of what they give."""

    ids: str
    weights: str


@dataclass(frozen=True)
class ExpertLayer:
    """Emit the experts ``prefix`` of one layer."""

    graph: OnnxGraph
    linear: Linear
    operators: Operators
    prefix: str
    hidden_size: int
    experts: Experts

    def emit(self, x: str) -> str:
        """Append what the experts make of ``x [T, hidden_size]``; returns ``[T, hidden_size]``.

        The router is float32 in a network of any dtype: a choice is all or nothing, and logits of 8 bits are often
        equal. Of equal ones the expert of the lower number is chosen.
        """
        choice = self._choice(self.linear.emit_float32(x, f"{self.prefix}.router", bias=self.experts.has_biases))
        return self._chosen(x, choice) if self.operators.multiplies_chosen else self._wide(x, choice)

    def _choice(self, logits: str) -> Choice:
        graph = self.graph
        probabilities = graph.op("Softmax", logits, axis=1)
        weights, ids = graph.ops("TopK", probabilities, graph.constant([self.experts.per_token]), outputs=2, axis=1)
        if self.experts.renormalises:
            weights = graph.op("Div", weights, graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1))
        return Choice(ids, weights)

    def _chosen(self, x: str, choice: Choice) -> str:
        """A row of each product, ``[T * k]``, is that of a row and one of its experts; these are added in order."""
        graph, hidden_size, size = self.graph, self.hidden_size, self.experts.intermediate_size
        ids = graph.op("Reshape", choice.ids, graph.constant([-1]))
        both = self.linear.emit_chosen(x, f"{self.prefix}.fc", ids, hidden_size, 2 * size)
        if self.experts.has_biases:
            both = graph.op("Add", both, self.linear.chosen_biases(f"{self.prefix}.fc", ids))
        y = self.linear.emit_chosen(self._gated(both), f"{self.prefix}.proj", ids, size, hidden_size)
        if self.experts.has_biases:
            y = graph.op("Add", y, self.linear.chosen_biases(f"{self.prefix}.proj", ids))
        return self._weighed(choice, y)

    def _weighed(self, choice: Choice, y: str) -> str:
        """Append the sum of what a row's experts give, ``y [T * k, hidden_size]`` of the network's dtype, weighed."""
        graph, own = self.graph, self.operators.onnx_type
        parts = graph.op("Reshape", y, graph.constant([-1, self.experts.per_token, self.hidden_size]))
        weights = graph.cast(graph.op("Unsqueeze", choice.weights, graph.constant([1])), TensorProto.FLOAT, own)
        return graph.op("Reshape", graph.op("MatMul", weights, parts), graph.constant([-1, self.hidden_size]))

    def _gated(self, both: str) -> str:
        """Append the gate over ``both [rows, 2 * ffn]``, up before gate; returns ``[rows, ffn]``."""
        graph, size, limit = self.graph, self.experts.intermediate_size, self.experts.gate_limit
        if limit is None:
            return self.operators.silu_gate(graph, both, size, up_first=True)

        def number(value: float) -> str:
            return graph.cast(graph.constant(value), TensorProto.FLOAT, self.operators.onnx_type)

        clamped = graph.op("Min", both, number(limit))
        up, gate = graph.ops("Split", clamped, graph.constant([size, size]), outputs=2, axis=1)
        factor = graph.op("Add", graph.op("Max", up, number(-limit)), number(1.0))
        sigmoid = graph.op("Sigmoid", graph.op("Mul", gate, number(GATE_SLOPE)))
        return graph.op("Mul", graph.op("Mul", gate, sigmoid), factor)

    def _wide(self, x: str, choice: Choice) -> str:
        graph, own, hidden_size = self.graph, self.operators.onnx_type, self.hidden_size
        count, size = self.experts.num_experts, self.experts.intermediate_size
        both = self.linear.emit(x, f"{self.prefix}.wide_fc", hidden_size, count * 2 * size)
        if self.experts.has_biases:
            by_row = graph.op("Reshape", both, graph.constant([-1, count, 2 * size]))
            both = graph.op("Add", by_row, self.linear.biases(f"{self.prefix}.fc"))
        activated = self._gated(graph.op("Reshape", both, graph.constant([-1, 2 * size])))
        activated = graph.op("Reshape", activated, graph.constant([-1, count, size]))
        gates = self._gates(choice)
        # What a row did not choose may overflow and leaves no trace; what it chose with a weight of NaN is NaN.
        is_chosen = graph.op("Not", graph.op("Equal", gates, graph.constant(0.0)))
        weighed = graph.op("Mul", activated, graph.cast(gates, TensorProto.FLOAT, own))
        kept = graph.op("Where", is_chosen, weighed, graph.cast(graph.constant(0.0), TensorProto.FLOAT, own))
        rows = graph.op("Reshape", kept, graph.constant([-1, count * size]))
        y = self.linear.emit(rows, f"{self.prefix}.wide_proj", count * size, hidden_size)
        if not self.experts.has_biases:
            return y
        ids = graph.op("Reshape", choice.ids, graph.constant([-1]))
        return graph.op("Add", y, self._weighed(choice, self.linear.chosen_biases(f"{self.prefix}.proj", ids)))

    def _gates(self, choice: Choice) -> str:
        """Append ``[T, experts, 1] float32``: the weight of each expert, 0 of those that are not chosen."""
        graph, every = self.graph, np.arange(self.experts.num_experts)
        ids, weights = (graph.op("Unsqueeze", value, graph.constant([2])) for value in choice)
        is_expert = graph.op("Equal", ids, graph.constant(every))  # [T, k, experts]
        of_each = graph.op("Where", is_expert, weights, graph.constant(0.0))
        gates = graph.op("ReduceSum", of_each, graph.constant([1]), keepdims=0)
        return graph.op("Unsqueeze", gates, graph.constant([2]))

"""The mixture-of-experts MLP: a row goes through the experts that a router gives most to.

Where operators multiply with chosen matrices, a row costs those it chose. Elsewhere all experts are one MLP as wide as
all of them, whose rows are zeros for what they did not choose: two products, for whatever a matrix is made of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from draftline.checkpoints.config import Experts
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import Operators


class Choice(NamedTuple):
    """The experts of each row, ``ids [T, k] int64``, and ``weights [T, k] float32`` of what they give."""

    ids: str
    weights: str


def emit_experts(
    graph: OnnxGraph, linear: Linear, operators: Operators, x: str, prefix: str, hidden_size: int, experts: Experts
) -> str:
    """Append the experts ``prefix`` of ``x [T, hidden_size]``; returns ``[T, hidden_size]``.

    The router is float32 in a network of any dtype: a choice is all or nothing, and logits of 8 bits are often equal.
    Of equal ones the expert of the lower number is chosen.
    """
    choice = _emit_choice(graph, linear.emit_float32(x, f"{prefix}.router"), experts)
    emit = _emit_chosen if operators.multiplies_chosen else _emit_wide
    return emit(graph, linear, operators, x, choice, prefix, hidden_size, experts)


def _emit_choice(graph: OnnxGraph, logits: str, experts: Experts) -> Choice:
    probabilities = graph.op("Softmax", logits, axis=1)
    weights, ids = graph.ops("TopK", probabilities, graph.constant([experts.per_token]), outputs=2, axis=1)
    if experts.renormalises:
        weights = graph.op("Div", weights, graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1))
    return Choice(ids, weights)


def _emit_chosen(
    graph: OnnxGraph,
    linear: Linear,
    operators: Operators,
    x: str,
    choice: Choice,
    prefix: str,
    hidden_size: int,
    experts: Experts,
) -> str:
    """A row of each product is that of a row and one expert of its, ``[T * k]``; they are added in the order of k."""
    count, size = experts.per_token, experts.intermediate_size
    ids = graph.op("Reshape", choice.ids, graph.constant([-1]))
    both = linear.emit_chosen(x, f"{prefix}.fc", ids, hidden_size, 2 * size)
    activated = operators.silu_gate(graph, both, size, up_first=True)
    y = linear.emit_chosen(activated, f"{prefix}.proj", ids, size, hidden_size)
    parts = graph.op("Reshape", y, graph.constant([-1, count, hidden_size]))
    weights = graph.op("Unsqueeze", choice.weights, graph.constant([1]))
    return graph.op("Reshape", graph.op("MatMul", weights, parts), graph.constant([-1, hidden_size]))


def _emit_wide(
    graph: OnnxGraph,
    linear: Linear,
    operators: Operators,
    x: str,
    choice: Choice,
    prefix: str,
    hidden_size: int,
    experts: Experts,
) -> str:
    count, size = experts.num_experts, experts.intermediate_size
    both = linear.emit(x, f"{prefix}.wide_fc", hidden_size, count * 2 * size)
    by_expert = graph.op("Reshape", both, graph.constant([-1, 2 * size]))
    activated = operators.silu_gate(graph, by_expert, size, up_first=True)
    activated = graph.op("Reshape", activated, graph.constant([-1, count, size]))
    gates = _emit_gates(graph, choice, count)
    # What a row did not choose may overflow, and leaves no trace; what it chose with a weight that is no number does.
    is_chosen = graph.op("Not", graph.op("Equal", gates, graph.constant(0.0)))
    weighed = graph.op("Mul", activated, graph.cast(gates, TensorProto.FLOAT, operators.onnx_type))
    nothing = graph.cast(graph.constant(0.0), TensorProto.FLOAT, operators.onnx_type)
    kept = graph.op("Where", is_chosen, weighed, nothing)
    rows = graph.op("Reshape", kept, graph.constant([-1, count * size]))
    return linear.emit(rows, f"{prefix}.wide_proj", count * size, hidden_size)


def _emit_gates(graph: OnnxGraph, choice: Choice, num_experts: int) -> str:
    """Append ``[T, experts, 1] float32``: the weight of each expert, 0 for those that are not chosen."""
    ids = graph.op("Unsqueeze", choice.ids, graph.constant([2]))
    is_expert = graph.op("Equal", ids, graph.constant(np.arange(num_experts)))  # [T, k, experts]
    weights = graph.op(
        "Where", is_expert, graph.op("Unsqueeze", choice.weights, graph.constant([2])), graph.constant(0.0)
    )
    gates = graph.op("ReduceSum", weights, graph.constant([1]), keepdims=0)
    return graph.op("Unsqueeze", gates, graph.constant([2]))

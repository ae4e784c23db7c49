"""Medusa heads: each proposes the token of one depth from the target's last hidden row."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from draftline.checkpoints.draft_config import HeadConfig
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import Operators


def emit_medusa_heads(
    graph: OnnxGraph,
    operators: Operators,
    weights: Mapping[str, TensorLocation],
    heads: HeadConfig,
    rows: str,
    target_lm_head: str,
    num_candidates: int,
) -> None:
    """Append the heads and the outputs ``head_ids int64`` and ``head_log_probs``, ``[R, heads, num_candidates]``.

    Source: Medusa (Cai et al., 2024), section 2.1: residual blocks ``x + SiLU(W x + b)``, then a projection to the
    vocabulary, which is ``target_lm_head`` for heads without one.

    Shapes: ``rows [R, hidden_size]``, what the target's lm_head reads: after the final norm.
    """
    linear, size = Linear(graph, weights, operators), heads.hidden_size
    ids: list[str] = []
    log_probs: list[str] = []
    for head in range(heads.num_heads):
        x = rows
        for layer in range(heads.num_layers):
            y = linear.emit(
                x, f"medusa_heads.{head}.medusa_layers.{layer}.linear", size, size, bias=heads.owns_medusa_biases
            )
            x = graph.op("Add", x, graph.op("Mul", y, graph.op("Sigmoid", y)))
        lm_head = f"medusa_heads.{head}.lm_head" if heads.owns_medusa_lm_heads else target_lm_head
        logits = linear.emit(x, lm_head, size, heads.vocab_size)
        logits = graph.cast(logits, operators.onnx_type, TensorProto.FLOAT)
        for found, values in zip((ids, log_probs), operators.candidates(graph, logits, num_candidates), strict=True):
            found.append(graph.op("Unsqueeze", values, graph.constant([1])))
    shape: list[int | str] = ["R", heads.num_heads, num_candidates]
    graph.output(graph.op("Concat", *ids, axis=1), "head_ids", TensorProto.INT64, shape)
    graph.output(graph.op("Concat", *log_probs, axis=1), "head_log_probs", TensorProto.FLOAT, shape)

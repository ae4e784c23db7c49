"""The end of every draft graph: the most probable tokens of a row."""

from __future__ import annotations

from onnx import TensorProto

from draftline.graphs.onnx_graph import OnnxGraph


def emit_candidates(graph: OnnxGraph, logits: str, num_candidates: int) -> tuple[str, str]:
    """Append the choice of the ``num_candidates`` most probable tokens, the most probable first.

    Shapes: ``logits [R, V]``; returns ``ids [R, num_candidates] int64`` and ``log_probs [R, num_candidates] float32``,
    log of the softmax over all V.
    """
    k = graph.constant([num_candidates])
    log_probs, ids = graph.ops("TopK", graph.op("LogSoftmax", logits, axis=-1), k, outputs=2, axis=1)
    return ids, log_probs


def target_ids(graph: OnnxGraph, ids: str, offsets: str) -> str:
    """Turn ids of a draft's own vocabulary into the target's: target id = id + offsets[id], ``offsets [V] int64``."""
    return graph.op("Add", ids, graph.op("Gather", offsets, ids))


def output_candidates(graph: OnnxGraph, ids: str, log_probs: str, num_candidates: int) -> None:
    """Add the outputs ``candidate_ids`` and ``candidate_log_probs``, ``[R, num_candidates]`` each."""
    graph.output(ids, "candidate_ids", TensorProto.INT64, ["R", num_candidates])
    graph.output(log_probs, "candidate_log_probs", TensorProto.FLOAT, ["R", num_candidates])

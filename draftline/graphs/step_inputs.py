"""Inputs that several graphs share: what attention reads, what sampling reads, how a draft step's rows stand."""

from __future__ import annotations

from typing import NamedTuple

from onnx import TensorProto

from draftline.graphs.onnx_graph import OnnxGraph


class AttentionInputs(NamedTuple):
    """Names of the fields of a batch that ``TreeAttention`` reads, in its order."""

    block_table: str
    context_lengths: str
    sequence_starts: str
    packed_mask: str


class SamplingInputs(NamedTuple):
    """Names of the per-row parameters of sampling, ``[R]`` each; ``top_k`` is int32."""

    temperature: str
    top_k: str
    top_p: str
    uniform: str


class InStepRows(NamedTuple):
    """How the rows of a draft step stand: M kept ones of earlier forwards, N new ones, T = M + N in packed order.

    - ``kept_kv [M, 2 * layers * K, D]``: keys and values of kept rows, as in ``kv_rows``.
    - ``row_ids [T] int32``: 0 .. M - 1 is a kept row, M .. T - 1 a new one.
    - ``new_rows [N] int32``: where the new rows stand among the T.
    """

    kept_kv: str
    row_ids: str
    new_rows: str


def emit_attention_inputs(graph: OnnxGraph) -> AttentionInputs:
    """Add the graph inputs of ``AttentionInputs``."""
    return AttentionInputs(
        graph.input("block_table", TensorProto.INT32, ["B", "max_blocks"]),
        graph.input("context_lengths", TensorProto.INT32, ["B"]),
        graph.input("sequence_starts", TensorProto.INT32, ["B_plus_1"]),
        graph.input("packed_mask", TensorProto.INT32, ["T", "W"]),
    )


def emit_sampling_inputs(graph: OnnxGraph) -> SamplingInputs:
    """Add the graph inputs of ``SamplingInputs``."""
    temperature = graph.input("temperature", TensorProto.FLOAT, ["R"])
    top_k = graph.input("top_k", TensorProto.INT32, ["R"])
    top_p = graph.input("top_p", TensorProto.FLOAT, ["R"])
    uniform = graph.input("uniform", TensorProto.FLOAT, ["R"])
    return SamplingInputs(temperature, top_k, top_p, uniform)


def emit_in_step_rows(
    graph: OnnxGraph, num_layers: int, num_kv_heads: int, head_size: int, pool_type: int
) -> InStepRows:
    """Add the graph inputs of ``InStepRows``; ``pool_type`` is the pool's ``TensorProto`` type."""
    return InStepRows(
        graph.input("kept_kv", pool_type, ["M", 2 * num_layers * num_kv_heads, head_size]),
        graph.input("row_ids", TensorProto.INT32, ["T"]),
        graph.input("new_rows", TensorProto.INT32, ["N"]),
    )

"""A separate draft model: a small network of the target's kind, with candidates beside the token it draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.graphs.candidates import output_candidates
from draftline.graphs.decoder import Decoder, Pool
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import PORTABLE, Operators
from draftline.graphs.step_inputs import emit_attention_inputs, emit_in_step_rows
from draftline.graphs.target import FINAL_NORM, embed_tokens, emit_logits


def build_draft_model_graph(
    config: CheckpointConfig,
    weights: Mapping[str, TensorLocation],
    pool: Pool,
    num_candidates: int,
    target_vocab_size: int,
    operators: Operators = PORTABLE,
) -> onnx.ModelProto:
    """Build the graph of one forward of a draft model.

    Inputs: ``input_ids``, ``position_ids [N]``, ``candidate_rows [R]``; those of ``AttentionInputs``,
    ``SamplingInputs`` and ``InStepRows``; the pools.
    Outputs: ``candidate_ids``, ``candidate_log_probs [R, num_candidates]``, ``sampled_ids [R] int64``, drawn as the
    target draws (``greedy_ids`` of operators without a sampler), ``logits [R, V]``, and
    ``kv_rows [N, 2 * layers * K, D]``. Some models' vocabularies are padded: logits of ids beyond
    ``target_vocab_size`` are left out, and ids beyond the draft's own read its last row.
    """
    graph = OnnxGraph()
    ids = graph.input("input_ids", TensorProto.INT32, ["N"])
    positions = graph.input("position_ids", TensorProto.INT32, ["N"])
    candidate_rows = graph.input("candidate_rows", TensorProto.INT32, ["R"])
    attention_inputs = emit_attention_inputs(graph)
    in_step = emit_in_step_rows(
        graph, config.num_hidden_layers, config.num_key_value_heads, config.head_size, pool.onnx_type
    )
    decoder = Decoder(graph, operators, weights, config, pool, positions, attention_inputs, in_step)
    if config.vocab_size < target_vocab_size:
        ids = graph.op("Min", ids, graph.constant(np.array(config.vocab_size - 1, np.int32)))
    stream = decoder.stream(embed_tokens(decoder, ids))
    for layer in range(config.num_hidden_layers):
        decoder.layer(stream, f"transformer.layers.{layer}")
    rows = decoder.norm(graph.op("Gather", stream.value(), candidate_rows), FINAL_NORM)
    logits = emit_logits(decoder, rows)
    vocab_size = min(config.vocab_size, target_vocab_size)
    if vocab_size < config.vocab_size:
        logits = graph.op("Slice", logits, *(graph.constant([value]) for value in (0, vocab_size, 1)))
    output_candidates(graph, *operators.candidates(graph, logits, num_candidates), num_candidates)
    operators.output_drawn(graph, logits, vocab_size, with_edits=False)
    graph.output(logits, "logits", TensorProto.FLOAT, ["R", vocab_size])
    decoder.output_kv_rows()
    return graph.model("draft_model", operators.functions())

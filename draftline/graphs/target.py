"""The target: a decoder-only transformer of Llama's kind as an ONNX graph.

Architectures differ in the fields of ``CheckpointConfig`` alone. Tensor names are TensorRT-LLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.graphs.decoder import Decoder, Pool
from draftline.graphs.medusa import emit_medusa_heads
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import PORTABLE, Operators
from draftline.graphs.step_inputs import emit_attention_inputs

EMBEDDING = "transformer.vocab_embedding"
FINAL_NORM = "transformer.ln_f.weight"
LM_HEAD = "lm_head"


@dataclass(frozen=True)
class DraftTaps:
    """What drafters take from the target's forward.

    ``captured_layers`` (0-based) and ``final_hidden`` give the columns of the output ``features``: the outputs of these
    layers, then the last hidden rows after the final norm, then the outputs of ``further_layers``, which no drafter of
    the engine reads. Taps change no node of the forward: a sum that is captured where another kernel would add and norm
    it has other bits, and another text. ``medusa``: heads in the target's graph, each with ``num_candidates``.
    """

    captured_layers: tuple[int, ...] = ()
    final_hidden: bool = False
    further_layers: tuple[int, ...] = ()
    medusa: HeadConfig | None = None
    num_candidates: int = 0


NO_TAPS = DraftTaps()


def lm_head_name(config: CheckpointConfig) -> str:
    return EMBEDDING if config.share_embedding_table else LM_HEAD


def embed_tokens(decoder: Decoder, ids: str) -> str:
    """Append the embedding of ``ids [T]``; returns ``[T, hidden_size]`` of the operators' dtype."""
    graph, scale = decoder.graph, decoder.config.embedding_scale
    rows = decoder.linear.embed(ids, EMBEDDING, decoder.config.hidden_size)
    if scale == 1.0:
        return rows
    return graph.op("Mul", rows, graph.cast(graph.constant(scale), TensorProto.FLOAT, decoder.operators.onnx_type))


def emit_logits(decoder: Decoder, rows: str) -> str:
    """Append the logits of normed ``rows``; returns ``[rows, V] float32``."""
    graph, config = decoder.graph, decoder.config
    logits = decoder.linear.emit(rows, lm_head_name(config), config.hidden_size, config.vocab_size)
    logits = graph.cast(logits, decoder.operators.onnx_type, TensorProto.FLOAT)
    if config.logit_softcap is None:
        return logits
    cap = graph.constant(config.logit_softcap)
    return graph.op("Mul", graph.op("Tanh", graph.op("Div", logits, cap)), cap)


def build_target_graph(
    config: CheckpointConfig,
    weights: Mapping[str, TensorLocation],
    pool: Pool,
    taps: DraftTaps = NO_TAPS,
    operators: Operators = PORTABLE,
) -> onnx.ModelProto:
    """Build the graph of one forward.

    Inputs are the fields of ``StepBatch`` (``packed_mask`` always given; ``edits`` as ``edit_rows`` and so on) and, for
    every layer L, ``kv_pool.L [num_blocks, 2, K, S, D]``.
    Outputs: ``sampled_ids [R] int64``, ``kv_rows [T, 2 * layers * K, D]`` (keys of a layer, then its values; rotated,
    uncommitted, of the pool's dtype) and ``logits [R, V] float32``, unedited, which is computed for the sampler anyway
    and read only when asked for. Operators without a sampler have ``greedy_ids`` in place of ``sampled_ids`` and of
    what sampling reads.
    With ``taps``: ``features [T, F]`` of the operators' dtype; ``head_ids`` and
    ``head_log_probs [R, heads, num_candidates]``.
    """
    graph = OnnxGraph()
    ids = graph.input("input_ids", TensorProto.INT32, ["T"])
    positions = graph.input("position_ids", TensorProto.INT32, ["T"])
    attention_inputs = emit_attention_inputs(graph)
    sample_rows = graph.input("sample_rows", TensorProto.INT32, ["R"])

    decoder = Decoder(graph, operators, weights, config, pool, positions, attention_inputs)
    stream = decoder.stream(embed_tokens(decoder, ids))
    layers = range(config.num_hidden_layers)
    inputs = [decoder.layer(stream, f"transformer.layers.{layer}") for layer in layers]
    x = stream.value()
    layer_outputs = [*inputs[1:], x]
    rows = decoder.norm(graph.op("Gather", x, sample_rows), FINAL_NORM)
    logits = emit_logits(decoder, rows)
    operators.output_drawn(graph, logits, config.vocab_size, with_edits=True)
    decoder.output_kv_rows()
    graph.output(logits, "logits", TensorProto.FLOAT, ["R", config.vocab_size])

    features = [layer_outputs[layer] for layer in taps.captured_layers]
    if taps.final_hidden:
        features.append(decoder.norm(x, FINAL_NORM))
    features += [layer_outputs[layer] for layer in taps.further_layers]
    if features:
        size = len(features) * config.hidden_size
        graph.output(graph.op("Concat", *features, axis=1), "features", operators.onnx_type, ["T", size])
    if taps.medusa:
        emit_medusa_heads(graph, operators, weights, taps.medusa, rows, lm_head_name(config), taps.num_candidates)
    return graph.model("target", operators.functions())

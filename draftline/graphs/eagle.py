"""EAGLE heads: a few layers that predict the target's next features from its last ones and the tokens drawn since."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.graphs.candidates import output_candidates, target_ids
from draftline.graphs.decoder import Decoder, Pool
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import PORTABLE, Operators
from draftline.graphs.step_inputs import emit_attention_inputs, emit_in_step_rows

EMBEDDING, LM_HEAD = "vocab_embedding", "lm_head"


def head_layers(head: HeadConfig) -> CheckpointConfig:
    """Describe the layers of an EAGLE head as those of a model."""
    return CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype=head.dtype,
        vocab_size=head.vocab_size,
        hidden_size=head.hidden_size,
        num_hidden_layers=head.num_layers,
        num_attention_heads=head.num_attention_heads,
        num_key_value_heads=head.num_key_value_heads,
        head_size=head.head_size,
        intermediate_size=head.intermediate_size,
        norm_epsilon=head.norm_epsilon,
        rotary_base=head.rotary_base,
        max_position_embeddings=head.max_position_embeddings,
        rotary_scaling=head.rotary_scaling,
        qkv_bias=head.qkv_bias,
        dense_bias=head.dense_bias,
        mlp_bias=head.mlp_bias,
        qk_norm=head.qk_norm,
    )


def feature_size(head: HeadConfig) -> int:
    """Columns of the target's features that the head reads."""
    return head.target_hidden_size * (len(head.captured_layers) or 1)


def build_eagle_graph(
    head: HeadConfig,
    weights: Mapping[str, TensorLocation],
    pool: Pool,
    num_candidates: int,
    operators: Operators = PORTABLE,
) -> onnx.ModelProto:
    """Build the graph of one forward of an EAGLE-1/2 or EAGLE-3 head.

    Source: EAGLE (Li et al., arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840) and their reference code. Row t takes the
    feature of the target's row t, the embedding of token t + 1 and the rotary position t.

    Inputs: ``input_ids``, ``position_ids [N]``; either ``target_features [N, F]`` or ``own_features [N, hidden_size]``,
    the other with no rows; ``candidate_rows [R]``; those of ``AttentionInputs`` and ``InStepRows``; the pools.
    Outputs: ``candidate_ids``, ``candidate_log_probs [R, num_candidates]``, ``kv_rows [N, 2 * layers * K, D]`` and
    ``hidden [N, hidden_size]``, what the next depth is fed with (EAGLE-3: before the final norm, EAGLE-3.1: after it).
    """
    graph, layers = OnnxGraph(), head_layers(head)
    ids = graph.input("input_ids", TensorProto.INT32, ["N"])
    positions = graph.input("position_ids", TensorProto.INT32, ["N"])
    target_features = graph.input("target_features", operators.onnx_type, ["F", feature_size(head)])
    own_features = graph.input("own_features", operators.onnx_type, ["O", head.hidden_size])
    candidate_rows = graph.input("candidate_rows", TensorProto.INT32, ["R"])
    attention_inputs = emit_attention_inputs(graph)
    in_step = emit_in_step_rows(graph, head.num_layers, head.num_key_value_heads, head.head_size, pool.onnx_type)
    decoder = Decoder(graph, operators, weights, layers, pool, positions, attention_inputs, in_step)
    embedded = decoder.linear.embed(ids, EMBEDDING, head.hidden_size)
    if head.method == "eagle3":
        hidden = _eagle3_layers(decoder, head, embedded, target_features, own_features)
    else:
        hidden = _eagle1_layers(decoder, head, embedded, graph.op("Concat", target_features, own_features, axis=0))
    if head.feeds_normed:
        hidden = decoder.norm(hidden, "ln_f.weight")
    rows = graph.op("Gather", hidden, candidate_rows)
    if head.method == "eagle3" and not head.feeds_normed:
        rows = decoder.norm(rows, "ln_f.weight")
    logits = decoder.linear.emit(rows, LM_HEAD, head.hidden_size, head.draft_vocab_size)
    logits = graph.cast(logits, operators.onnx_type, TensorProto.FLOAT)
    ids, log_probs = operators.candidates(graph, logits, num_candidates)
    if "d2t" in weights:
        ids = target_ids(graph, ids, decoder.weight("d2t"))
    output_candidates(graph, ids, log_probs, num_candidates)
    decoder.output_kv_rows()
    graph.output(hidden, "hidden", operators.onnx_type, ["N", head.hidden_size])
    return graph.model(head.method, operators.functions())


def _eagle1_layers(decoder: Decoder, head: HeadConfig, embedded: str, features: str) -> str:
    """The first layer has no input norm, and no norm follows the last: the output is a feature of the target."""
    both = decoder.graph.op("Concat", embedded, features, axis=1)
    x = decoder.linear.emit(both, "fc", 2 * head.hidden_size, head.hidden_size, bias=head.fc_bias)
    return _layers(decoder, head, x, x, head.hidden_size)


def _eagle3_layers(decoder: Decoder, head: HeadConfig, embedded: str, target_features: str, own_features: str) -> str:
    """``fc`` narrows the target's features alone: the head's own output is as wide as the head already."""
    graph, size = decoder.graph, head.hidden_size
    normed_features = _normed_features(decoder, head, target_features)
    narrowed = decoder.linear.emit(normed_features, "fc", feature_size(head), size, bias=head.fc_bias)
    x = graph.op("Concat", narrowed, own_features, axis=0)
    normed = decoder.norm(x, "layers.0.hidden_norm.weight")
    normed_embedding = decoder.norm(embedded, "layers.0.input_layernorm.weight")
    both = graph.op("Concat", normed_embedding, normed, axis=1)
    return _layers(decoder, head, normed if head.norm_before_residual else x, both, 2 * size)


def _normed_features(decoder: Decoder, head: HeadConfig, features: str) -> str:
    if head.feature_norm == "none":
        return features
    if head.feature_norm == "joined":
        return decoder.norm(features, "input_norm.weight")
    graph, num_features = decoder.graph, len(head.captured_layers)
    sizes = graph.constant([head.target_hidden_size] * num_features)
    parts = graph.ops("Split", features, sizes, outputs=num_features, axis=1)
    return graph.op("Concat", *(decoder.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)), axis=1)


def _layers(decoder: Decoder, head: HeadConfig, x: str, attention_input: str, num_inputs: int) -> str:
    stream = decoder.stream(x)
    decoder.residuals(stream, attention_input, num_inputs, "layers.0")
    for layer in range(1, head.num_layers):
        decoder.layer(stream, f"layers.{layer}")
    return stream.value()

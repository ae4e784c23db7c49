"""The target: a decoder-only transformer of the Llama family as an ONNX graph.

Llama, Mistral, Qwen2/2.5 and Qwen3 differ in the fields of ``CheckpointConfig`` alone. Tensor names are TensorRT-LLM's.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph, TensorLocation
from draftline.graphs.sampler import emit_edit_inputs, emit_edited_sampler
from draftline.graphs.tree_attention import load_tree_attention_function

EMBEDDING = "transformer.vocab_embedding"
FINAL_NORM = "transformer.ln_f.weight"
LM_HEAD = "lm_head"
ROTARY_COSINES, ROTARY_SINES = "rotary.cosines", "rotary.sines"


def build_target_graph(
    config: CheckpointConfig, weights: Mapping[str, TensorLocation], block_size: int
) -> onnx.ModelProto:
    """Build the graph of one forward.

    Inputs are the fields of ``StepBatch`` (``packed_mask`` always given; ``edits`` as ``edit_rows`` and so on) and, for
    every layer L, ``kv_pool.L [num_blocks, 2, K, S, D]``.
    Outputs: ``sampled_ids [R] int64``, ``kv_rows [2 * layers, T, K * D]`` (keys of a layer, then its values; rotated,
    uncommitted) and ``logits [R, V]``, unedited, which is computed for the sampler anyway and read only when asked for.
    """
    graph = OnnxGraph()
    ids = graph.input("input_ids", TensorProto.INT32, ["T"])
    positions = graph.input("position_ids", TensorProto.INT32, ["T"])
    attention_inputs = [
        graph.input("block_table", TensorProto.INT32, ["B", "max_blocks"]),
        graph.input("context_lengths", TensorProto.INT32, ["B"]),
        graph.input("sequence_starts", TensorProto.INT32, ["B_plus_1"]),
        graph.input("packed_mask", TensorProto.INT32, ["T", "W"]),
    ]
    sample_rows = graph.input("sample_rows", TensorProto.INT32, ["R"])
    temperature = graph.input("temperature", TensorProto.FLOAT, ["R"])
    top_k = graph.input("top_k", TensorProto.INT32, ["R"])
    top_p = graph.input("top_p", TensorProto.FLOAT, ["R"])
    uniform = graph.input("uniform", TensorProto.FLOAT, ["R"])
    edits = emit_edit_inputs(graph)

    linear = Linear(graph, weights)
    target = _Target(graph, linear, config, weights, block_size)
    x = linear.embed(ids, EMBEDDING, config.hidden_size)
    position_row = graph.op("Unsqueeze", graph.op("Cast", positions, to=TensorProto.INT64), graph.constant([0]))
    kv_rows: list[str] = []
    pool_shape: list[int | str] = ["num_blocks", 2, config.num_key_value_heads, block_size, config.head_size]
    for layer in range(config.num_hidden_layers):
        pool = graph.input(f"kv_pool.{layer}", TensorProto.FLOAT, pool_shape)
        x = target.layer(x, layer, position_row, pool, attention_inputs, kv_rows)

    rows = target.norm(graph.op("Gather", x, sample_rows), FINAL_NORM)
    lm_head = EMBEDDING if config.share_embedding_table else LM_HEAD
    logits = linear.emit(rows, lm_head, config.hidden_size, config.vocab_size)
    wanted = graph.op("Cast", top_k, to=TensorProto.INT64)
    sampled = emit_edited_sampler(graph, logits, edits, temperature, wanted, top_p, uniform, config.vocab_size)
    graph.output(sampled, "sampled_ids", TensorProto.INT64, ["R"])
    kv_size = config.num_key_value_heads * config.head_size
    graph.output(
        graph.op("Concat", *kv_rows, axis=0), "kv_rows", TensorProto.FLOAT, [2 * config.num_hidden_layers, "T", kv_size]
    )
    graph.output(logits, "logits", TensorProto.FLOAT, ["R", config.vocab_size])
    return graph.model("target", [load_tree_attention_function()])


class _Target:
    def __init__(
        self,
        graph: OnnxGraph,
        linear: Linear,
        config: CheckpointConfig,
        weights: Mapping[str, TensorLocation],
        block_size: int,
    ) -> None:
        self.graph, self.linear, self.config, self.weights = graph, linear, config, weights
        self.block_size = block_size

    def weight(self, name: str) -> str:
        return self.graph.external(name, self.weights[name])

    def norm(self, x: str, weight: str) -> str:
        return self.graph.op("RMSNormalization", x, self.weight(weight), epsilon=self.config.norm_epsilon)

    def layer(
        self, x: str, layer: int, position_row: str, pool: str, attention_inputs: list[str], kv_rows: list[str]
    ) -> str:
        prefix = f"transformer.layers.{layer}"
        graph, config = self.graph, self.config
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        attended = self.attention(normed, f"{prefix}.attention", position_row, pool, attention_inputs, kv_rows)
        x = graph.op("Add", x, attended)
        normed = self.norm(x, f"{prefix}.post_layernorm.weight")
        size = config.intermediate_size
        # mlp.fc (Hugging Face's gate_proj) and mlp.gate (up_proj) lie side by side: one product serves both.
        both = self.linear.emit(normed, f"{prefix}.mlp.fc_gate", config.hidden_size, 2 * size, bias=config.mlp_bias)
        fc, gate = graph.ops("Split", both, graph.constant([size, size]), outputs=2, axis=1)
        activated = graph.op("Mul", graph.op("Mul", fc, graph.op("Sigmoid", fc)), gate)
        down = self.linear.emit(activated, f"{prefix}.mlp.proj", size, config.hidden_size, bias=config.mlp_bias)
        return graph.op("Add", x, down)

    def attention(
        self, x: str, prefix: str, position_row: str, pool: str, attention_inputs: list[str], kv_rows: list[str]
    ) -> str:
        graph, config = self.graph, self.config
        q_size = config.num_attention_heads * config.head_size
        kv_size = config.num_key_value_heads * config.head_size
        qkv = self.linear.emit(x, f"{prefix}.qkv", config.hidden_size, q_size + 2 * kv_size, bias=config.qkv_bias)
        qkv_3d = graph.op("Unsqueeze", qkv, graph.constant([0]))
        q, k, v = graph.ops("Split", qkv_3d, graph.constant([q_size, kv_size, kv_size]), outputs=3, axis=2)
        if config.qk_norm:
            q = self.head_norm(q, f"{prefix}.q_layernorm.weight", config.num_attention_heads)
            k = self.head_norm(k, f"{prefix}.k_layernorm.weight", config.num_key_value_heads)
        q = self.rotate(q, position_row, config.num_attention_heads)
        k = self.rotate(k, position_row, config.num_key_value_heads)
        kv_rows += [k, v]
        by_head = [
            graph.op("Reshape", value, graph.constant([-1, num_heads, config.head_size]))
            for value, num_heads in (
                (q, config.num_attention_heads),
                (k, config.num_key_value_heads),
                (v, config.num_key_value_heads),
            )
        ]
        out = graph.op(
            "TreeAttention",
            *by_head,
            pool,
            *attention_inputs,
            domain=DRAFTLINE,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            block_size=self.block_size,
            scale=config.head_size**-0.5,
            window=config.sliding_window or 0,
        )
        return self.linear.emit(out, f"{prefix}.dense", q_size, config.hidden_size, bias=config.dense_bias)

    def head_norm(self, x: str, weight: str, num_heads: int) -> str:
        graph = self.graph
        heads = graph.op("Reshape", x, graph.constant([1, -1, num_heads, self.config.head_size]))
        return graph.op("Reshape", self.norm(heads, weight), graph.constant([1, -1, num_heads * self.config.head_size]))

    def rotate(self, x: str, position_row: str, num_heads: int) -> str:
        cosines, sines = self.weight(ROTARY_COSINES), self.weight(ROTARY_SINES)
        return self.graph.op("RotaryEmbedding", x, cosines, sines, position_row, num_heads=num_heads)

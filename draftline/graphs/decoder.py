"""Transformer layers of the Llama family, as the target, draft models and EAGLE heads share them.

Tensor names are TensorRT-LLM's. A draft's rows may attend to rows that earlier forwards of the same step computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph, TensorLocation
from draftline.graphs.step_inputs import AttentionInputs, InStepRows

ROTARY_COSINES, ROTARY_SINES = "rotary.cosines", "rotary.sines"


class Decoder:
    """Emit layers one after another; each adds the graph input ``kv_pool.L [num_blocks, 2, K, S, D]``.

    ``in_step`` None: the rows are all in-step rows there are. Otherwise those of kept rows join them in attention.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        weights: Mapping[str, TensorLocation],
        config: CheckpointConfig,
        block_size: int,
        position_ids: str,
        attention_inputs: AttentionInputs,
        in_step: InStepRows | None = None,
    ) -> None:
        self.graph, self.weights, self.config = graph, weights, config
        self.linear = Linear(graph, weights)
        self._block_size, self._attention_inputs, self._in_step = block_size, attention_inputs, in_step
        wide_positions = graph.op("Cast", position_ids, to=TensorProto.INT64)
        # A row is a sequence of its own to RotaryEmbedding, which takes no more rows of one than its tables have.
        self._position_column = graph.op("Unsqueeze", wide_positions, graph.constant([1]))
        self._kv_rows: list[str] = []
        self._kept_kv = None if in_step is None else self._split_kept(in_step)

    def _split_kept(self, in_step: InStepRows) -> list[str]:
        num_planes = 2 * self.config.num_hidden_layers
        sizes = self.graph.constant([1] * num_planes)
        return self.graph.ops("Split", in_step.kept_kv, sizes, outputs=num_planes, axis=1)

    def weight(self, name: str) -> str:
        return self.graph.external(name, self.weights[name])

    def norm(self, x: str, weight: str) -> str:
        return self.graph.op("RMSNormalization", x, self.weight(weight), epsilon=self.config.norm_epsilon)

    def layer(self, x: str, prefix: str) -> str:
        """Append a whole layer; returns its output ``[rows, hidden_size]``."""
        normed = self.norm(x, f"{prefix}.input_layernorm.weight")
        return self.residuals(x, normed, self.config.hidden_size, prefix)

    def residuals(self, x: str, attention_input: str, num_inputs: int, prefix: str) -> str:
        """Append attention over ``attention_input [rows, num_inputs]`` and the MLP, each added to ``x``."""
        attended = self._attention(attention_input, num_inputs, f"{prefix}.attention")
        x = self.graph.op("Add", x, attended)
        return self.graph.op("Add", x, self._mlp(self.norm(x, f"{prefix}.post_layernorm.weight"), f"{prefix}.mlp"))

    def output_kv_rows(self) -> None:
        """Add the output ``kv_rows [rows, 2 * layers, K * D]``: keys of a layer, then its values; rotated."""
        rows = "T" if self._in_step is None else "N"
        kv_size = self.config.num_key_value_heads * self.config.head_size
        everything = self.graph.op("Concat", *self._kv_rows, axis=1)
        self.graph.output(everything, "kv_rows", TensorProto.FLOAT, [rows, len(self._kv_rows), kv_size])

    def _mlp(self, x: str, prefix: str) -> str:
        graph, config, size = self.graph, self.config, self.config.intermediate_size
        # mlp.fc (Hugging Face's gate_proj) and mlp.gate (up_proj) lie side by side: one product serves both.
        both = self.linear.emit(x, f"{prefix}.fc_gate", config.hidden_size, 2 * size, bias=config.mlp_bias)
        fc, gate = graph.ops("Split", both, graph.constant([size, size]), outputs=2, axis=1)
        activated = graph.op("Mul", graph.op("Mul", fc, graph.op("Sigmoid", fc)), gate)
        return self.linear.emit(activated, f"{prefix}.proj", size, config.hidden_size, bias=config.mlp_bias)

    def _attention(self, x: str, num_inputs: int, prefix: str) -> str:
        graph, config = self.graph, self.config
        q_size = config.num_attention_heads * config.head_size
        kv_size = config.num_key_value_heads * config.head_size
        qkv = self.linear.emit(x, f"{prefix}.qkv", num_inputs, q_size + 2 * kv_size, bias=config.qkv_bias)
        qkv_3d = graph.op("Unsqueeze", qkv, graph.constant([1]))
        q, k, v = graph.ops("Split", qkv_3d, graph.constant([q_size, kv_size, kv_size]), outputs=3, axis=2)
        if config.qk_norm:
            q = self._head_norm(q, f"{prefix}.q_layernorm.weight", config.num_attention_heads)
            k = self._head_norm(k, f"{prefix}.k_layernorm.weight", config.num_key_value_heads)
        q = self._rotate(q, config.num_attention_heads)
        k = self._rotate(k, config.num_key_value_heads)
        attended = self._attend(q, k, v)
        return self.linear.emit(attended, f"{prefix}.dense", q_size, config.hidden_size, bias=config.dense_bias)

    def _attend(self, q: str, k: str, v: str) -> str:
        graph, config, layer = self.graph, self.config, len(self._kv_rows) // 2
        pool_shape: list[int | str] = ["num_blocks", 2, config.num_key_value_heads, self._block_size, config.head_size]
        pool = graph.input(f"kv_pool.{layer}", TensorProto.FLOAT, pool_shape)
        self._kv_rows += [k, v]
        if self._in_step is not None:
            q, k, v = self._join_kept(q, k, v, layer, self._in_step)
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
            *self._attention_inputs,
            domain=DRAFTLINE,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            block_size=self._block_size,
            scale=config.head_size**-0.5,
            window=config.sliding_window or 0,
        )
        return out if self._in_step is None else graph.op("Gather", out, self._in_step.new_rows)

    def _join_kept(self, q: str, k: str, v: str, layer: int, in_step: InStepRows) -> tuple[str, str, str]:
        """Rows in packed order. A kept row asks for nothing: its query is any, and its output is not gathered."""
        assert self._kept_kv is not None
        graph = self.graph
        kept_k, kept_v = self._kept_kv[2 * layer : 2 * layer + 2]
        num_kept = graph.op("Cast", graph.op("Shape", kept_k, start=0, end=1), to=TensorProto.INT32)
        no_row = graph.op("Cast", graph.constant(0), to=TensorProto.INT32)
        queries = graph.op("Max", graph.op("Sub", in_step.row_ids, num_kept), no_row)
        return (
            graph.op("Gather", q, queries),
            graph.op("Gather", graph.op("Concat", kept_k, k, axis=0), in_step.row_ids),
            graph.op("Gather", graph.op("Concat", kept_v, v, axis=0), in_step.row_ids),
        )

    def _head_norm(self, x: str, weight: str, num_heads: int) -> str:
        graph = self.graph
        heads = graph.op("Reshape", x, graph.constant([-1, num_heads, self.config.head_size]))
        return graph.op("Reshape", self.norm(heads, weight), graph.constant([-1, 1, num_heads * self.config.head_size]))

    def _rotate(self, x: str, num_heads: int) -> str:
        cosines, sines = self.weight(ROTARY_COSINES), self.weight(ROTARY_SINES)
        return self.graph.op("RotaryEmbedding", x, cosines, sines, self._position_column, num_heads=num_heads)

"""Transformer layers of Llama's kind, as the target, draft models and EAGLE heads share them.

Tensor names are TensorRT-LLM's. A draft's rows may attend to rows that earlier forwards of the same step computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.graphs.experts import ExpertLayer
from draftline.graphs.linear import Linear
from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph, TensorLocation
from draftline.graphs.operators import HeadNorms, Heads, Operators, Rotary
from draftline.graphs.step_inputs import AttentionInputs, InStepRows

ROTARY = ("rotary.cosines", "rotary.sines")
LOCAL_ROTARY = ("local_rotary.cosines", "local_rotary.sines")  # of layers with a window, where they have their own


class Pool(NamedTuple):
    """What a graph must know of its paged pools: tokens of a block, and ``TensorProto`` type of an element.

    ``scales``: of a float8 pool, of the keys and of the values of each layer; its elements are INT8, the bits of float8
    numbers. A pool of another type with scales holds what a float8 pool would, times the scales. Rows to commit have
    the network's type then, and whoever commits rounds them.
    """

    block_size: int
    onnx_type: int
    scales: tuple[tuple[float, float], ...] = ()

    def row_type(self, network_type: int) -> int:
        """Return the type of rows to commit, in a network whose rows have ``network_type``."""
        return network_type if self.scales else self.onnx_type


class Stream:
    """The residual stream ``[rows, hidden_size]``: its last addend waits, so that it is added where it is normed."""

    def __init__(self, decoder: Decoder, x: str) -> None:
        self._decoder, self._x = decoder, x
        self._addend: str | None = None

    def add(self, y: str) -> None:
        self._x = self.value()
        self._addend = y

    def value(self) -> str:
        if self._addend is not None:
            self._x, self._addend = self._decoder.graph.op("Add", self._x, self._addend), None
        return self._x

    def normed(self, weight: str) -> str:
        """Append the RMS norm by the tensor ``weight``."""
        if self._addend is None:
            return self._decoder.norm(self._x, weight)
        decoder, addend, self._addend = self._decoder, self._addend, None
        self._x, normed = decoder.operators.add_norm(
            decoder.graph, self._x, addend, decoder.norm_weight(weight), decoder.config.norm_epsilon
        )
        return normed


class Decoder:
    """Emit layers one after another; each adds the graph input ``kv_pool.L [num_blocks, 2, K, S, D]``.

    ``in_step`` None: the rows are all in-step rows there are. Otherwise those of kept rows join them in attention.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        operators: Operators,
        weights: Mapping[str, TensorLocation],
        config: CheckpointConfig,
        pool: Pool,
        position_ids: str,
        attention_inputs: AttentionInputs,
        in_step: InStepRows | None = None,
    ) -> None:
        self.graph, self.operators, self.weights, self.config = graph, operators, weights, config
        self.linear = Linear(graph, weights, operators)
        self._heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_size)
        self._pool, self._position_ids, self._attention_inputs = pool, position_ids, attention_inputs
        self._in_step = in_step
        self._kv_rows: list[str] = []
        self._kept_kv = None if in_step is None else self._split_kept(in_step)

    def _split_kept(self, in_step: InStepRows) -> list[str]:
        num_planes = 2 * self.config.num_hidden_layers
        assert not self._pool.scales, "kept rows have the pool's type"
        kept = self.graph.cast(in_step.kept_kv, self._pool.onnx_type, self.operators.onnx_type)
        sizes = self.graph.constant([self._heads.num_kv_heads] * num_planes)
        return self.graph.ops("Split", kept, sizes, outputs=num_planes, axis=1)

    def weight(self, name: str) -> str:
        return self.graph.external(name, self.weights[name])

    def norm_weight(self, name: str) -> str:
        """Return a norm's weight in the rows' dtype; checkpoints may hold it in float32."""
        return self.graph.cast(self.weight(name), self.weights[name].onnx_type, self.operators.onnx_type)

    def norm(self, x: str, weight: str) -> str:
        return self.graph.op("RMSNormalization", x, self.norm_weight(weight), epsilon=self.config.norm_epsilon)

    def stream(self, x: str) -> Stream:
        return Stream(self, x)

    def layer(self, stream: Stream, prefix: str) -> str:
        """Append a whole layer; return what it reads, the output of the layer before."""
        normed = stream.normed(f"{prefix}.input_layernorm.weight")
        before = stream.value()  # adds nothing: that was done where it was normed
        self.residuals(stream, normed, self.config.hidden_size, prefix)
        return before

    def residuals(self, stream: Stream, attention_input: str, num_inputs: int, prefix: str) -> None:
        """Append attention over ``attention_input [rows, num_inputs]`` and the MLP, each added to the stream."""
        attended = self._attention(attention_input, num_inputs, f"{prefix}.attention")
        if self.config.post_norms:
            stream.add(self.norm(attended, f"{prefix}.post_layernorm.weight"))
            y = self._mlp(stream.normed(f"{prefix}.pre_feedforward_layernorm.weight"), f"{prefix}.mlp")
            stream.add(self.norm(y, f"{prefix}.post_feedforward_layernorm.weight"))
        else:
            stream.add(attended)
            stream.add(self._mlp(stream.normed(f"{prefix}.post_layernorm.weight"), f"{prefix}.mlp"))

    def output_kv_rows(self) -> None:
        """Add the output ``kv_rows [rows, 2 * layers * K, D]``: keys of a layer, then its values; rotated.

        They have the pool's dtype: rounded here, where it is cheap, and as ``TreeAttention`` rounds in-step rows. Those
        of a float8 pool have the network's.
        """
        row_type = self._pool.row_type(self.operators.onnx_type)
        rows = "T" if self._in_step is None else "N"
        num_kv_heads, size = self._heads.num_kv_heads, self._heads.head_size
        heads = self.graph.op("Concat", *self._kv_rows, axis=1)
        heads = self.graph.cast(heads, self.operators.onnx_type, row_type)
        self.graph.output(heads, "kv_rows", row_type, [rows, len(self._kv_rows) * num_kv_heads, size])

    def _mlp(self, x: str, prefix: str) -> str:
        config, size = self.config, self.config.intermediate_size
        if config.experts is not None:
            parts = self.graph, self.linear, self.operators
            return ExpertLayer(*parts, prefix, config.hidden_size, config.experts).emit(x)
        # mlp.fc (Hugging Face's gate_proj) and mlp.gate (up_proj) lie side by side: one product serves both.
        both = self.linear.emit(x, f"{prefix}.fc_gate", config.hidden_size, 2 * size, bias=config.mlp_bias)
        gate = {"silu": self.operators.silu_gate, "gelu_pytorch_tanh": self.operators.gelu_gate}[config.hidden_act]
        activated = gate(self.graph, both, size)
        return self.linear.emit(activated, f"{prefix}.proj", size, config.hidden_size, bias=config.mlp_bias)

    def _attention(self, x: str, num_inputs: int, prefix: str) -> str:
        config, (num_heads, num_kv_heads, size) = self.config, self._heads
        num_outputs = (num_heads + 2 * num_kv_heads) * size
        qkv = self.linear.emit(x, f"{prefix}.qkv", num_inputs, num_outputs, bias=config.qkv_bias)
        is_local = config.local_rotary_base is not None and config.window(self._layer) > 0
        cosines, sines = map(self.weight, LOCAL_ROTARY if is_local else ROTARY)
        rotary = Rotary(cosines, sines, self._position_ids, config.rotary_size)
        norms = None
        if config.qk_norm:
            norms = HeadNorms(*(self.norm_weight(f"{prefix}.{x}_layernorm.weight") for x in "qk"))
        q, k, v = self.operators.rotated_heads(self.graph, qkv, self._heads, rotary, norms, config.norm_epsilon)
        attended = self._attend(q, k, v, self._sinks(prefix))
        return self.linear.emit(attended, f"{prefix}.dense", num_heads * size, config.hidden_size, config.dense_bias)

    @property
    def _layer(self) -> int:
        """The number of the layer that is being appended."""
        return len(self._kv_rows) // 2

    def _sinks(self, prefix: str) -> str:
        """Return a layer's sinks ``[H] float32``, -inf where the model has none."""
        if not self.config.attention_sinks:
            return self.graph.constant(np.full(self._heads.num_heads, -np.inf, np.float32), "no_sinks")
        name = f"{prefix}.sinks"
        return self.graph.cast(self.weight(name), self.weights[name].onnx_type, TensorProto.FLOAT)

    def _attend(self, q: str, k: str, v: str, sinks: str) -> str:
        layer, (num_heads, num_kv_heads, size) = self._layer, self._heads
        pool_shape: list[int | str] = ["num_blocks", 2, num_kv_heads, self._pool.block_size, size]
        pool = self.graph.input(f"kv_pool.{layer}", self._pool.onnx_type, pool_shape)
        self._kv_rows += [k, v]
        if self._in_step is not None:
            q, k, v = self._join_kept(q, k, v, layer, self._in_step)
        key_scale, value_scale = self._pool.scales[layer] if self._pool.scales else (1.0, 1.0)
        if self._pool.scales and self._pool.onnx_type != TensorProto.INT8:
            k, v = self._round_to_float8(k, key_scale), self._round_to_float8(v, value_scale)
            key_scale = value_scale = 1.0
        out = self.graph.op(
            "TreeAttention",
            q,
            k,
            v,
            pool,
            *self._attention_inputs,
            sinks,
            domain=DRAFTLINE,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=size,
            block_size=self._pool.block_size,
            scale=(self.config.query_pre_attn_scalar or size) ** -0.5,
            window=self.config.window(layer),
            softcap=self.config.attention_softcap or 0.0,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return out if self._in_step is None else self.graph.op("Gather", out, self._in_step.new_rows)

    def _round_to_float8(self, x: str, scale: float) -> str:
        """Append the rounding of rows to what a float8 pool holds of them; beyond 448 a cast gives 448."""
        graph, own = self.graph, self.operators.onnx_type
        scaled = graph.op("Div", graph.cast(x, own, TensorProto.FLOAT), graph.constant(scale))
        numbers = graph.op("Cast", graph.op("Cast", scaled, to=TensorProto.FLOAT8E4M3FN), to=TensorProto.FLOAT)
        return graph.cast(graph.op("Mul", numbers, graph.constant(scale)), TensorProto.FLOAT, own)

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

"""A converted checkpoint as an OpenVINO model, of the operators that the vendor's own exporter emits for its family."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.bench.transformers_reference import load_sources
from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.optional_package import import_optional
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import DraftlineError

PIP_LINE = "pip install 'draftline[openvino]'"
MODEL_FILE = "openvino_model.xml"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


def write_openvino_model(checkpoint: Path, directory: Path, *, int8: bool) -> None:
    """Write ``openvino_model.xml`` and its weights, float32 or, by the vendor's ``nncf``, int8 by rows, asymmetric.

    Raises: DraftlineError for a checkpoint that is not of Llama's plain family, MissingPackageError without OpenVINO.
    """
    config = load_checkpoint_config(checkpoint)
    is_plain = not (config.qkv_bias or config.dense_bias or config.mlp_bias or config.qk_norm or config.rotary_scaling)
    if config.architecture not in ARCHITECTURES or not is_plain or config.sliding_window:
        rule = "the model for OpenVINO is Llama's, and has no biases, norms of heads, rotary scaling or window"
        raise DraftlineError(checkpoint, rule, config.architecture, "leave openvino out: uninstall openvino-genai")
    openvino = import_optional("openvino", "the OpenVINO model", PIP_LINE)
    model = _Emitter(config, load_sources(checkpoint, config)).model()
    if int8:
        with contextlib.redirect_stdout(sys.stderr):  # it tells of its progress
            nncf = import_optional("nncf", "the int8 OpenVINO model", PIP_LINE)
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(model, directory / MODEL_FILE, compress_to_fp16=False)


class _Emitter:
    """Values are OpenVINO's nodes, ``[B, T, ...]``. Keys and values are state, which the pipeline turns into pages."""

    def __init__(self, config: CheckpointConfig, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self._ov: Any = import_optional("openvino", "the OpenVINO model", PIP_LINE)
        self._op: Any = import_optional("openvino.opset13", "the OpenVINO model", PIP_LINE)
        self._config, self._weights = config, weights
        self._sinks: list[Any] = []

    def model(self) -> Any:
        ov, op, config = self._ov, self._op, self._config
        ids, mask, positions = (self._input(name, [-1, -1]) for name in ("input_ids", "attention_mask", "position_ids"))
        self._beams = self._input("beam_idx", [-1], ov.Type.i32)
        self._batch = op.gather(op.shape_of(ids), self._ints([0]), self._ints(0))
        table = self._constant(self._weights["model.embed_tokens.weight"])
        x = op.gather(table, op.convert(ids, ov.Type.i32), self._ints(0))
        self._cosines, self._sines = self._rotary_tables(positions)
        self._mask = self._attention_mask(ids, mask)
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}"
            x = op.add(x, self._attention(self._norm(x, f"{prefix}.input_layernorm"), f"{prefix}.self_attn", layer))
            x = op.add(x, self._mlp(self._norm(x, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp"))
        x = self._norm(x, "model.norm")
        logits = op.matmul(x, table, False, True) if config.share_embedding_table else self._linear(x, "lm_head")
        logits.output(0).set_names({"logits"})
        inputs = [ids, mask, positions, self._beams]
        return ov.Model([op.result(logits)], self._sinks, inputs, "target")

    def _input(self, name: str, shape: list[int], kind: Any = None) -> Any:
        parameter = self._op.parameter(shape, kind or self._ov.Type.i64, name=name)
        parameter.output(0).set_names({name})
        return parameter

    def _constant(self, array: NDArray[Any]) -> Any:
        return self._op.constant(np.ascontiguousarray(array))

    def _ints(self, values: int | list[int]) -> Any:
        return self._op.constant(np.array(values, np.int64))

    def _linear(self, x: Any, name: str) -> Any:
        return self._op.matmul(x, self._constant(self._weights[f"{name}.weight"]), False, True)

    def _norm(self, x: Any, name: str) -> Any:
        op = self._op
        one, two, epsilon = (
            self._constant(np.full((1, 1, 1), value, np.float32)) for value in (1, 2, self._config.norm_epsilon)
        )
        square = op.reduce_mean(op.power(x, two), self._ints([-1]), True)
        normed = op.multiply(x, op.divide(one, op.sqrt(op.add(square, epsilon))))
        return op.multiply(self._constant(self._weights[f"{name}.weight"][None, None]), normed)

    def _mlp(self, x: Any, prefix: str) -> Any:
        gate = self._op.swish(self._linear(x, f"{prefix}.gate_proj"))
        return self._linear(self._op.multiply(gate, self._linear(x, f"{prefix}.up_proj")), f"{prefix}.down_proj")

    def _rotary_tables(self, positions: Any) -> tuple[Any, Any]:
        op, size = self._op, self._config.head_size
        frequencies = (self._config.rotary_base ** -(np.arange(0, size, 2) / size)).astype(np.float32)
        row = op.convert(op.unsqueeze(positions, self._ints(1)), self._ov.Type.f32)
        angles = op.transpose(
            op.matmul(self._constant(frequencies[None, :, None]), row, False, False), self._ints([0, 2, 1])
        )
        both = op.concat([angles, angles], -1)
        cosines, sines = (op.unsqueeze(function(both), self._ints(1)) for function in (op.cos, op.sin))
        return cosines, sines

    def _rotate(self, x: Any) -> Any:
        op, half = self._op, self._config.head_size // 2
        low = op.slice(x, self._ints([0]), self._ints([half]), self._ints([1]), self._ints([3]))
        high = op.slice(x, self._ints([half]), self._ints([2**63 - 1]), self._ints([1]), self._ints([3]))
        turned = op.concat([op.multiply(high, self._constant(np.full((1, 1, 1, 1), -1, np.float32))), low], -1)
        return op.add(op.multiply(x, self._cosines), op.multiply(turned, self._sines))

    def _heads(self, x: Any, count: int) -> Any:
        split = self._op.reshape(x, self._ints([0, 0, count, self._config.head_size]), True)
        return self._op.transpose(split, self._ints([0, 2, 1, 3]))

    def _kept(self, x: Any, name: str) -> Any:
        """Append ``x [B, K, T, D]`` to the state ``name``, repeated for every query head."""
        op, config = self._op, self._config
        num_heads, size = config.num_key_value_heads, config.head_size
        empty = op.concat([self._batch, self._ints([num_heads]), self._ints([0]), self._ints([size])], 0)
        start = op.broadcast(self._constant(np.array(0, np.float32)), empty)
        past = op.read_value(start, name, self._ov.Type.f32, self._ov.PartialShape([-1, num_heads, -1, size]))
        whole = op.concat([op.gather(past, self._beams, self._ints(0)), x], 2)
        self._sinks.append(op.assign(whole, name))
        groups = config.num_attention_heads // num_heads
        if groups == 1:
            return whole
        length = op.gather(op.shape_of(whole), self._ints([2]), self._ints(0))
        shape = op.concat([self._batch, *map(self._ints, ([num_heads], [groups])), length, self._ints([size])], 0)
        repeated = op.broadcast(op.unsqueeze(whole, self._ints(2)), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, self._ints([0, config.num_attention_heads, -1, size]), True)

    def _attention_mask(self, ids: Any, mask: Any) -> Any:
        """Append ``[B, 1, T, past + T]``: 0 where a token may attend, far below elsewhere."""
        op, zero = self._op, self._ints(0)
        total, new = (op.gather(op.shape_of(x), self._ints(1), zero) for x in (mask, ids))
        keys = op.unsqueeze(op.range(zero, total, self._ints(1), "i64"), self._ints([0, 1, 2]))
        queries = op.range(op.subtract(total, new), total, self._ints(1), "i64")
        is_past = op.less_equal(keys, op.unsqueeze(queries, self._ints([0, 1, 3])))
        is_there = op.convert(op.unsqueeze(mask, self._ints([1, 2])), self._ov.Type.boolean)
        seen = op.logical_and(is_past, is_there)
        return op.select(seen, *(self._constant(np.array(value, np.float32)) for value in (0.0, -65504.0)))

    def _attention(self, x: Any, prefix: str, layer: int) -> Any:
        op, config = self._op, self._config
        q = self._rotate(self._heads(self._linear(x, f"{prefix}.q_proj"), config.num_attention_heads))
        k = self._rotate(self._heads(self._linear(x, f"{prefix}.k_proj"), config.num_key_value_heads))
        v = self._heads(self._linear(x, f"{prefix}.v_proj"), config.num_key_value_heads)
        keys = self._kept(k, f"past_key_values.{layer}.keypresent.{layer}.key")
        values = self._kept(v, f"past_key_values.{layer}.valuepresent.{layer}.value")
        scale = self._constant(np.array(config.head_size**-0.5, np.float32))
        out = op.scaled_dot_product_attention(q, keys, values, self._mask, scale, causal=False)
        joined = op.transpose(out, self._ints([0, 2, 1, 3]))
        flat = op.reshape(joined, self._ints([0, 0, config.num_attention_heads * config.head_size]), True)
        return self._linear(flat, f"{prefix}.o_proj")

"""What each kind of layer computes, in numpy: for the kinds that our graphs become.

Source: the layers' pages of NVIDIA's TensorRT operator reference. Floating-point inputs arrive in float32, whatever the
tensor's dtype; what a function returns is rounded to the dtype of the layer's output by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.errors import BuildError
from draftline.oracle import tree_attention
from draftline.sessions.tensorrt.plugin import TreeAttentionPlugin

Array = NDArray[Any]
Inputs = Sequence[Any]  # arrays; None for inputs that a slice has not
LayerFunction = Callable[[Any, Inputs], "Array | tuple[Array, ...]"]

ELEMENTWISE: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else np.trunc(np.divide(a, b)),
    "POW": np.power,
    "FLOOR_DIV": np.floor_divide,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": np.reciprocal,
    "ABS": np.abs,
    "NEG": np.negative,
    "NOT": np.logical_not,
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}
ACTIVATION: dict[str, Callable[[Array], Array]] = {
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "RELU": lambda x: np.maximum(x, 0),
    "TANH": np.tanh,
}
REDUCE: dict[str, Callable[..., Array]] = {"SUM": np.sum, "PROD": np.prod, "MAX": np.max, "MIN": np.min, "AVG": np.mean}


def _named(table: dict[str, Any], key: Any, layer: Any) -> Any:
    if key.name not in table:
        rule = f"the network check knows {', '.join(table)}"
        raise BuildError(layer.name, rule, key.name, "set check.network to never, and report this layer")
    return table[key.name]


def _axes(bits: int) -> tuple[int, ...]:
    return tuple(axis for axis in range(bits.bit_length()) if bits >> axis & 1)


def _matrix_multiply(layer: Any, inputs: Inputs) -> Array:
    def operand(x: Any, kind: str) -> Any:
        if kind == "VECTOR":
            raise BuildError(layer.name, "the network check knows products of matrices", kind, "report this layer")
        return np.swapaxes(x, -1, -2) if kind == "TRANSPOSE" else x

    return cast(Array, operand(inputs[0], layer.op0.name) @ operand(inputs[1], layer.op1.name))


def _gather(layer: Any, inputs: Inputs) -> Array:
    data, indices = inputs
    if layer.mode.name == "DEFAULT" and layer.num_elementwise_dims == 0:
        return cast(Array, np.take(data, indices, axis=layer.axis))
    if layer.mode.name == "ELEMENT":
        return np.take_along_axis(data, indices, axis=layer.axis)
    rule = "the network check knows gathers along one axis"
    raise BuildError(layer.name, rule, layer.mode.name, "set check.network to never, and report this layer")


def _shuffle(layer: Any, inputs: Inputs) -> Array:
    data: Array = inputs[0]
    data = data.transpose(tuple(layer.first_transpose)[: data.ndim])
    if len(inputs) > 1:
        wanted: Sequence[int] = inputs[1].tolist()
    elif len(layer.reshape_dims) or layer.get_output(0).shape == ():
        wanted = tuple(layer.reshape_dims)
    else:
        wanted = data.shape
    if layer.zero_is_placeholder:
        wanted = [data.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    data = data.reshape(tuple(wanted))
    return data.transpose(tuple(layer.second_transpose)[: data.ndim])


def _slice(layer: Any, inputs: Inputs) -> Array:
    """Inputs after the data, absent ones as None: start, size, stride, fill, axes."""
    data, given = inputs[0], [*inputs[1:], None, None, None, None, None][:5]
    if given[3] is not None or given[4] is not None or layer.mode.name not in ("STRICT_BOUNDS", "CLAMP"):
        rule = "the network check knows slices inside their bounds"
        raise BuildError(layer.name, rule, layer.mode.name, "set check.network to never, and report this layer")
    start, size, stride = (
        tuple(fixed) if value is None else tuple(value.tolist())
        for fixed, value in zip((layer.start, layer.shape or (), layer.stride), given[:3], strict=True)
    )
    ends = [first + step * count for first, count, step in zip(start, size, stride, strict=True)]
    assert min(stride) > 0, "slices go forward"
    return cast(Array, data[tuple(map(slice, start, ends, stride))])


def _dequantize(layer: Any, inputs: Inputs) -> Array:
    """Codes times scales: one for each place along ``layer.axis``, or for each block along it."""
    codes, scales = inputs[:2]
    if len(inputs) > 2 or scales.ndim not in (1, codes.ndim):
        rule = "the network check knows codes with scales of places or blocks, and no zero point"
        raise BuildError(layer.name, rule, f"{len(inputs)} inputs", "set check.network to never")
    if scales.ndim == 1:
        return cast(Array, codes * np.expand_dims(scales, [axis for axis in range(codes.ndim) if axis != layer.axis]))
    return cast(Array, codes * np.repeat(scales, codes.shape[layer.axis] // scales.shape[layer.axis], axis=layer.axis))


def _top_k(layer: Any, inputs: Inputs) -> tuple[Array, ...]:
    (axis,) = _axes(layer.axes)
    k = int(inputs[1]) if len(inputs) > 1 else layer.k
    values = inputs[0]
    order = np.argsort(-values if layer.op.name == "MAX" else values, axis=axis, kind="stable")
    indices = np.take(order, range(k), axis=axis)
    return np.take_along_axis(values, indices, axis=axis), indices


def _softmax(layer: Any, inputs: Inputs) -> Array:
    (axis,) = _axes(layer.axes)
    weights = np.exp(inputs[0] - inputs[0].max(axis=axis, keepdims=True))
    return cast(Array, weights / weights.sum(axis=axis, keepdims=True))


def _unsqueeze(layer: Any, inputs: Inputs) -> Array:
    return np.expand_dims(inputs[0], tuple(int(axis) for axis in inputs[1].reshape(-1)))


def _squeeze(layer: Any, inputs: Inputs) -> Array:
    return cast(Array, np.squeeze(inputs[0], tuple(int(axis) for axis in inputs[1].reshape(-1))))


def _plugin(layer: Any, inputs: Inputs) -> Array:
    plugin = layer.plugin
    if not isinstance(plugin, TreeAttentionPlugin):
        rule = "the network check knows the plugin TreeAttention"
        raise BuildError(layer.name, rule, type(plugin).__name__, "set check.network to never")
    q, k_new, v_new, pool, *tables = inputs
    # A row is rounded as the pool would round it; the oracle does so by the pool's dtype.
    stored = pool.view if pool.dtype == np.int8 else pool.astype
    pool = stored(numpy_dtype(plugin.kernels.shape.kv_dtype))
    return tree_attention(
        q,
        k_new,
        v_new,
        pool,
        *tables,
        scale=plugin.scales["scale"],
        window=plugin.attributes["window"],
        softcap=plugin.attributes["softcap"],
        key_scale=plugin.scales["key_scale"],
        value_scale=plugin.scales["value_scale"],
    )


def _reduce(layer: Any, inputs: Inputs) -> Array:
    function = _named(REDUCE, layer.op, layer)
    return cast(Array, function(inputs[0], axis=_axes(layer.axes), keepdims=layer.keep_dims))


# By the name of the vendor's LayerType; CONSTANT is read by who walks the network.
LAYER_FUNCTIONS: dict[str, LayerFunction] = {
    "ACTIVATION": lambda layer, inputs: _named(ACTIVATION, layer.type, layer)(inputs[0]),
    "CAST": lambda layer, inputs: inputs[0],
    "CONCATENATION": lambda layer, inputs: np.concatenate(inputs, axis=layer.axis),
    "DEQUANTIZE": _dequantize,
    "ELEMENTWISE": lambda layer, inputs: _named(ELEMENTWISE, layer.op, layer)(*inputs),
    "GATHER": _gather,
    "IDENTITY": lambda layer, inputs: inputs[0],
    "MATRIX_MULTIPLY": _matrix_multiply,
    "PLUGIN_V3": _plugin,
    "REDUCE": _reduce,
    "SELECT": lambda layer, inputs: np.where(inputs[0].astype(np.bool_), inputs[1], inputs[2]),
    "SHAPE": lambda layer, inputs: np.array(inputs[0].shape, np.int64),
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "SOFTMAX": _softmax,
    "SQUEEZE": _squeeze,
    "TOPK": _top_k,
    "UNARY": lambda layer, inputs: _named(UNARY, layer.op, layer)(inputs[0]),
    "UNSQUEEZE": _unsqueeze,
}

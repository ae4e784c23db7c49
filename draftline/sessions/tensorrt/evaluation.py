"""A parsed network, evaluated layer by layer in numpy: what an engine was asked to compute, without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.errors import BuildError
from draftline.sessions.tensorrt.layer_functions import LAYER_FUNCTIONS
from draftline.sessions.tensorrt.network import ParsedNetwork, layers_of

Array = NDArray[Any]
HIDDEN_TYPES = {onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.FLOAT8E4M3FN: "float8_e4m3fn"}


def evaluate_network(
    network: ParsedNetwork, feeds: Mapping[str, Array], weights: Mapping[str, Array] = MappingProxyType({})
) -> dict[str, Array]:
    """Evaluate ``network`` for the inputs ``feeds``, by name; returns all outputs by name.

    ``weights``: by ``read_hidden_weights``.

    Numerics: every layer computes in float32 from inputs of its dtype and rounds its result to the dtype of its output,
    once; TreeAttention in float64 (``draftline.oracle``). An engine fuses layers, and rounds less often.

    Raises: BuildError for a kind of layer that is not known here, and for inputs that are not the network's.
    """
    definition = network.definition
    inputs = [definition.get_input(index) for index in range(definition.num_inputs)]
    _check_feeds(network, inputs, feeds)
    values = {tensor.name: feeds[tensor.name] for tensor in inputs}
    outputs = [definition.get_output(index) for index in range(definition.num_outputs)]
    layers = _in_order(layers_of(network), set(values))
    readers = Counter(name for _, layer in layers for name in _input_names(layer) if name)
    readers.update(tensor.name for tensor in outputs)
    for kind, layer in layers:
        for index, result in enumerate(_results(network, kind, layer, values, weights)):
            tensor = layer.get_output(index)
            value = np.asarray(result).astype(_dtype(network, tensor), copy=False)
            _check_shape(layer, tensor, value)
            values[tensor.name] = value
        for name in _input_names(layer):
            if name:
                readers[name] -= 1
                if not readers[name]:
                    del values[name]
    return {tensor.name: values[tensor.name] for tensor in outputs}


def read_hidden_weights(file: Path) -> dict[str, Array]:
    """Return the initializers of the graph in ``file`` that the vendor's bindings do not hand out.

    Those of ``HIDDEN_TYPES``, mapped where they lie, and those of int4, a code per byte.
    """
    model = onnx.load(file, load_external_data=False)
    weights: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        path, offset = file.parent / where["location"], int(where["offset"])
        if tensor.data_type in HIDDEN_TYPES:
            dtype = numpy_dtype(HIDDEN_TYPES[tensor.data_type])
            weights[tensor.name] = np.memmap(path, dtype, "r", offset, tuple(tensor.dims))
        elif tensor.data_type == onnx.TensorProto.INT4:
            packed = np.memmap(path, np.int8, "r", offset, (tensor.dims[0], tensor.dims[1] // 2))
            codes = np.stack([np.left_shift(packed, 4) >> 4, packed >> 4], axis=-1)
            weights[tensor.name] = codes.reshape(tuple(tensor.dims))
    return weights


def _in_order(layers: Sequence[tuple[str, Any]], known: set[str]) -> list[tuple[str, Any]]:
    """Sort layers so that each comes after those it reads; the parser adds some after their readers."""
    ordered: list[tuple[str, Any]] = []
    waiting = list(layers)
    while waiting:
        later = []
        for kind, layer in waiting:
            if all(name is None or name in known for name in _input_names(layer)):
                known.update(layer.get_output(index).name for index in range(layer.num_outputs))
                ordered.append((kind, layer))
            else:
                later.append((kind, layer))
        assert len(later) < len(waiting), f"{later[0][1].name} reads a tensor that no layer makes"
        waiting = later
    return ordered


def _results(
    network: ParsedNetwork, kind: str, layer: Any, values: Mapping[str, Array], weights: Mapping[str, Array]
) -> list[Array]:
    if kind == "CONSTANT":
        return [_constant(network, layer, weights)]
    if kind not in LAYER_FUNCTIONS:
        rule = f"the network check knows the layers {', '.join(LAYER_FUNCTIONS)}"
        raise BuildError(layer.name, rule, kind, "set check.network to never, and report this layer")
    inputs = [None if name is None else _wide(values[name]) for name in _input_names(layer)]
    results = LAYER_FUNCTIONS[kind](layer, inputs)
    return list(results) if isinstance(results, tuple) else [results]


def _input_names(layer: Any) -> list[str | None]:
    tensors = [layer.get_input(index) for index in range(layer.num_inputs)]
    return [None if tensor is None else tensor.name for tensor in tensors]


def _constant(network: ParsedNetwork, layer: Any, weights: Mapping[str, Array]) -> Array:
    tensor, values = layer.get_output(0), layer.weights
    if not isinstance(values, np.ndarray):
        if layer.name not in weights:
            rule = "the network check is given the weights that bindings do not hand out"
            raise BuildError(layer.name, rule, tensor.dtype.name, "report this layer")
        values = weights[layer.name]
    shaped: Array = values.reshape(tuple(tensor.shape))
    return shaped.astype(_dtype(network, tensor), copy=False)


def _wide(value: Array) -> Array:
    is_float = value.dtype.kind == "f" or value.dtype.name in ("bfloat16", "float8_e4m3fn")
    return value.astype(np.float32, copy=False) if is_float else value


def _dtype(network: ParsedNetwork, tensor: Any) -> np.dtype[Any]:
    if tensor.dtype.name == "INT4":
        return np.dtype(np.int8)  # a code per byte
    name = network.vendor.dtype_names.get(tensor.dtype)
    if name is None:
        rule = "the network check knows types of whole bytes"
        raise BuildError(tensor.name, rule, tensor.dtype.name, "set check.network to never")
    return numpy_dtype(name)


def _check_feeds(network: ParsedNetwork, inputs: list[Any], feeds: Mapping[str, Array]) -> None:
    names = {tensor.name for tensor in inputs}
    if names != set(feeds):
        got = f"missing {sorted(names - set(feeds))}, unexpected {sorted(set(feeds) - names)}"
        raise BuildError("network check", "is fed what the network reads", got, "feed these")
    for tensor in inputs:
        value, dtype = feeds[tensor.name], _dtype(network, tensor)
        if value.dtype != dtype or not _fits(tuple(tensor.shape), value.shape):
            rule = f"is fed {dtype} {tuple(tensor.shape)}"
            raise BuildError(f"network check: {tensor.name}", rule, f"{value.dtype} {value.shape}", "feed these")


def _check_shape(layer: Any, tensor: Any, value: Array) -> None:
    """Hold a result to the shape that the vendor infers: a layer that is misread here shows at once."""
    shape = tuple(tensor.shape)
    if not _fits(shape, value.shape):
        raise BuildError(layer.name, f"has the shape {shape}", value.shape, "report this layer")


def _fits(shape: tuple[int, ...], found: tuple[int, ...]) -> bool:
    return len(shape) == len(found) and all(a in (-1, b) for a, b in zip(shape, found, strict=True))

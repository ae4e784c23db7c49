"""A small builder of ONNX graphs: one method call per node, values are their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 23
IR_VERSION = 11
MICROSOFT = "com.microsoft"
DRAFTLINE = "draftline"


class TensorLocation(NamedTuple):
    """Raw bytes of a tensor inside a file beside the model: ONNX's external data."""

    file: str
    offset: int
    num_bytes: int
    onnx_type: int
    shape: tuple[int, ...]


class OnnxGraph:
    """Nodes, initializers, inputs and outputs of one graph; names are unique in a model, subgraphs included."""

    def __init__(self, parent: OnnxGraph | None = None) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._output_names: dict[str, str] = {}  # of values that are outputs
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names: set[str] = parent._names if parent else set()

    def _unique(self, stem: str) -> str:
        name, count = stem, 1
        while name in self._names:
            name, count = f"{stem}_{count}", count + 1
        self._names.add(name)
        return name

    def input(self, name: str, onnx_type: int, shape: Sequence[int | str]) -> str:
        self._names.add(name)
        self._inputs.append(helper.make_tensor_value_info(name, onnx_type, shape))
        return name

    def output(self, value: str, name: str, onnx_type: int, shape: Sequence[int | str]) -> None:
        """Make ``value`` an output; its node gives it under that name, for a copy would run in every step."""
        is_of_node = any(value in node.output for node in self._nodes)
        if is_of_node and value not in self._output_names:
            self._output_names[value] = name
        else:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._names.add(name)
        self._outputs.append(helper.make_tensor_value_info(name, onnx_type, shape))

    def constant(self, value: int | float | Sequence[int] | NDArray[Any], name: str = "constant") -> str:
        """Add a small constant: int -> int64, float -> float32; equal constants are one initializer."""
        if isinstance(value, float):
            array: NDArray[Any] = np.array(value, np.float32)
        elif isinstance(value, np.ndarray):
            array = value
        else:
            array = np.array(value, np.int64)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._unique(name)
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def external(self, name: str, location: TensorLocation) -> str:
        """Add an initializer whose bytes lie in a file; adding the same name again returns it."""
        if name in self._names:
            return name
        tensor = TensorProto(name=name, data_type=location.onnx_type, dims=location.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location.file), ("offset", location.offset), ("length", location.num_bytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._names.add(name)
        self._initializers.append(tensor)
        return name

    def ops(
        self, op: str, *inputs: str, outputs: int, domain: str = "", name: str | None = None, **attributes: Any
    ) -> list[str]:
        """Append a node with several outputs; returns their names."""
        names = [self._unique(name or op.lower()) for _ in range(outputs)]
        self._nodes.append(helper.make_node(op, inputs, names, name=names[0], domain=domain, **attributes))
        return names

    def op(self, op: str, *inputs: str, domain: str = "", name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output; returns its name."""
        return self.ops(op, *inputs, outputs=1, domain=domain, name=name, **attributes)[0]

    def cast(self, value: str, onnx_type: int, to: int) -> str:
        """Append the cast of a value of ``onnx_type``, where there is something to cast; returns its name."""
        return value if onnx_type == to else self.op("Cast", value, to=to)

    def branch(
        self, condition: str, then: Callable[[OnnxGraph], str], otherwise: Callable[[OnnxGraph], str], onnx_type: int
    ) -> str:
        """Append ``If``: each function emits its branch into a subgraph that sees outer values; returns its value."""
        branches = []
        for emit in (then, otherwise):
            graph = OnnxGraph(parent=self)
            value = emit(graph)
            name = graph._unique("branch")
            graph._nodes.append(helper.make_node("Identity", [value], [name]))
            graph._outputs.append(helper.make_value_info(name, helper.make_tensor_type_proto(onnx_type, None)))
            branches.append(graph._graph_proto(name))
        return self.op("If", condition, then_branch=branches[0], else_branch=branches[1])

    def _graph_proto(self, name: str) -> onnx.GraphProto:
        return helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._initializers)

    def _rename(self, nodes: Iterable[onnx.NodeProto]) -> None:
        """Give values that are outputs their names, in subgraphs as well."""
        for node in nodes:
            for names in (node.input, node.output):
                names[:] = [self._output_names.get(name, name) for name in names]
            for attribute in node.attribute:
                self._rename(attribute.g.node)

    def model(self, name: str, functions: Sequence[onnx.FunctionProto]) -> onnx.ModelProto:
        opsets = [
            helper.make_opsetid(domain, version) for domain, version in (("", OPSET), (MICROSOFT, 1), (DRAFTLINE, 1))
        ]
        self._rename(self._nodes)
        return helper.make_model(
            self._graph_proto(name),
            functions=functions,
            opset_imports=opsets,
            ir_version=IR_VERSION,
            producer_name="draftline",
        )

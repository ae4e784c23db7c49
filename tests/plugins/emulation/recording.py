"""A pytest plugin that records the calls of native operators which the tests make, for ``replay``.

``pytest -p tests.plugins.emulation.recording --record FILE tests/plugins``; ``MAX_CALLS`` per test and operator.
"""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import AttributeProto, numpy_helper

from draftline.graphs.onnx_graph import DRAFTLINE
from tests.plugins import native

MAX_CALLS = 10
Arrays = dict[str, NDArray[Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("record").open("wb")
    config.add_cleanup(file.close)
    calls: Counter[tuple[str, str]] = Counter()
    open_plain = native.open_session

    class RecordingSession:
        """Also runs the graph with the tensors around its native operators as outputs, and records them."""

        def __init__(self, model: onnx.ModelProto, num_threads: int = 1) -> None:
            self._plain = open_plain(model, num_threads)
            self._nodes = [node for node in model.graph.node if node.domain == DRAFTLINE]
            self._constants: Arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
            self._recorded: list[str] = []
            if self._nodes:
                shown = onnx.ModelProto()
                shown.CopyFrom(model)
                known = {value.name for value in (*model.graph.input, *model.graph.output)} | self._constants.keys()
                around = {name for node in self._nodes for name in (*node.input, *node.output) if name}
                shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(around - known))
                self._recorded = sorted(around - self._constants.keys() - {value.name for value in model.graph.input})
                self._shown = open_plain(shown, 1)

        def run(self, names: list[str] | None, inputs: Arrays, *options: Any) -> list[NDArray[Any]]:
            results: list[NDArray[Any]] = self._plain.run(names, inputs, *options)
            test = str(getattr(config, "_running_test", ""))
            if any(calls[node.op_type, test] < MAX_CALLS for node in self._nodes):
                computed = dict(zip(self._recorded, self._shown.run(self._recorded, inputs), strict=True))
                for node in self._nodes:
                    calls[node.op_type, test] += 1
                    write_call(file, node, {**self._constants, **inputs, **computed})
            return results

        def __getattr__(self, name: str) -> Any:
            return getattr(self._plain, name)

    native.open_session = RecordingSession  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    item.config._running_test = item.nodeid  # type: ignore[attr-defined]
    return (yield)


def write_call(file: BinaryIO, node: onnx.NodeProto, tensors: Arrays) -> None:
    """Append one call in the form that ``replay.cpp`` reads."""
    integers = [attribute for attribute in node.attribute if attribute.type == AttributeProto.INT]
    reals = [attribute for attribute in node.attribute if attribute.type == AttributeProto.FLOAT]
    _write_text(file, node.op_type.encode())
    _write_integers(file, len(integers))
    for attribute in integers:
        _write_text(file, attribute.name.encode())
        _write_integers(file, attribute.i)
    _write_integers(file, len(reals))
    for attribute in reals:
        _write_text(file, attribute.name.encode())
        _write_text(file, struct.pack("<f", attribute.f))
    for names in (node.input, node.output):
        _write_integers(file, len(names))
        for name in names:
            if not name:
                _write_integers(file, onnx.TensorProto.UNDEFINED)
                continue
            tensor = np.ascontiguousarray(tensors[name])
            kind = onnx.helper.np_dtype_to_tensor_dtype(tensor.dtype)
            _write_integers(file, kind, np.ndim(tensors[name]), *np.shape(tensors[name]))
            _write_text(file, tensor.tobytes())


def _write_integers(file: BinaryIO, *values: int) -> None:
    file.write(struct.pack(f"<{len(values)}q", *values))


def _write_text(file: BinaryIO, text: bytes) -> None:
    _write_integers(file, len(text))
    file.write(text)

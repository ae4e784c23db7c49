from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation


def test_names_are_unique_and_equal_constants_are_one() -> None:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T"])
    one, same, two = graph.constant(1.0), graph.constant(1.0), graph.constant(2.0)
    assert one == same
    assert one != two
    assert graph.constant(1) != one, "int64, not float32"
    assert graph.constant([1]) != graph.constant(1), "a vector, not a scalar"
    sums = [graph.op("Add", x, one), graph.op("Add", x, two), graph.op("Add", x, two, name="add")]
    assert len(set(sums)) == 3
    graph.output(sums[2], "y", TensorProto.FLOAT, ["T"])
    model = graph.model("names", [])
    onnx.checker.check_model(model, full_check=True)
    assert len(model.graph.initializer) == 4


@pytest.mark.parametrize(("flag", "expected"), [(True, [2.0, 3.0]), (False, [2.0, 4.0])])
def test_a_branch_sees_outer_values(flag: bool, expected: list[float]) -> None:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T"])
    condition = graph.input("condition", TensorProto.BOOL, [])
    chosen = graph.branch(
        condition,
        lambda inner: inner.op("Add", x, inner.constant(1.0)),
        lambda inner: inner.op("Mul", x, inner.constant(2.0)),
        TensorProto.FLOAT,
    )
    graph.output(chosen, "y", TensorProto.FLOAT, ["T"])
    model = graph.model("branch", [])
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": np.array([1.0, 2.0], np.float32), "condition": np.array(flag)}
    assert session.run(None, feeds)[0].tolist() == expected


def test_outputs_are_copied_only_where_one_value_has_two_names() -> None:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T"])
    doubled = graph.op("Add", x, x)
    halved = graph.branch(
        graph.constant(np.array(True)),
        lambda inner: inner.op("Mul", doubled, inner.constant(0.25)),
        lambda inner: inner.op("Mul", doubled, doubled),
        TensorProto.FLOAT,
    )
    for name, value in (("doubled", doubled), ("halved", halved), ("again", doubled), ("unchanged", x)):
        graph.output(value, name, TensorProto.FLOAT, ["T"])
    model = graph.model("outputs", [])
    onnx.checker.check_model(model)
    assert [node.output[0] for node in model.graph.node if node.op_type == "Identity"] == ["again", "unchanged"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = session.run(None, {"x": np.array([1.0, 2.0], np.float32)})
    assert [value.tolist() for value in outputs] == [[2.0, 4.0], [0.5, 1.0], [2.0, 4.0], [1.0, 2.0]]


def test_weights_lie_in_a_file_at_any_offset(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    (tmp_path / "weights").write_bytes(b"12345" + weight.tobytes() + b"6")
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T", 2])
    location = TensorLocation("weights", 5, weight.nbytes, TensorProto.FLOAT, weight.shape)
    assert graph.external("w", location) == graph.external("w", location)
    graph.output(graph.op("MatMul", x, "w"), "y", TensorProto.FLOAT, ["T", 3])
    model = graph.model("external", [])
    assert len(model.graph.initializer) == 1
    onnx.save(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    x_value = np.array([[1.0, 10.0]], np.float32)
    assert session.run(None, {"x": x_value})[0].tolist() == (x_value @ weight).tolist()

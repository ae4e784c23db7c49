"""A layer of experts, wide and chosen, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.checkpoints.config import Experts
from draftline.graphs.experts import ExpertLayer
from draftline.graphs.linear import Linear
from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph, TensorLocation
from draftline.graphs.operators import PORTABLE
from draftline.sessions.native_kernels import find_library

OPERATORS = {"wide": PORTABLE, "chosen": NATIVE}
Array = NDArray[np.float32]


class Layer(NamedTuple):
    """``router [E, hidden]``, ``fc [E, 2 * ffn, hidden]`` (up above gate), ``proj [E, hidden, ffn]``."""

    router: Array
    fc: Array
    proj: Array


def random_layer(num_experts: int, size: int, hidden: int, seed: int) -> Layer:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    return Layer(normal(num_experts, hidden), normal(num_experts, 2 * size, hidden), normal(num_experts, hidden, size))


def run(tmp_path: Path, form: str, layer: Layer, x: Array, per_token: int, renormalises: bool) -> Array:
    num_experts, double, hidden = layer.fc.shape
    tensors = {
        "mlp.router.weight": layer.router,
        "mlp.fc.weight": layer.fc,
        "mlp.proj.weight": layer.proj,
        "mlp.wide_fc.weight": layer.fc.reshape(-1, hidden),
        "mlp.wide_proj.weight": np.concatenate(list(layer.proj), axis=1),
    }
    locations, data = {}, b""
    for name, tensor in tensors.items():
        locations[name] = TensorLocation("weights.bin", len(data), tensor.nbytes, TensorProto.FLOAT, tensor.shape)
        data += tensor.tobytes()
    (tmp_path / "weights.bin").write_bytes(data)
    graph, operators = OnnxGraph(), OPERATORS[form]
    linear = Linear(graph, locations, operators)
    experts = Experts(num_experts, per_token, double // 2, renormalises)
    layer_of_graph = ExpertLayer(graph, linear, operators, "mlp", hidden, experts)
    y = layer_of_graph.emit(graph.input("x", TensorProto.FLOAT, ["T", hidden]))
    graph.output(y, "y", TensorProto.FLOAT, ["T", hidden])
    path = tmp_path / "model.onnx"
    path.write_bytes(graph.model("experts", []).SerializeToString())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(find_library()))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result


def reference(layer: Layer, x: Array, per_token: int, renormalises: bool) -> NDArray[np.float64]:
    rows = []
    for row in x.astype(np.float64):
        logits = layer.router @ row
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        chosen = np.argsort(-probabilities, kind="stable")[:per_token]
        weights = probabilities[chosen] / (probabilities[chosen].sum() if renormalises else 1)
        total = np.zeros(len(row))
        for weight, expert in zip(weights, chosen, strict=True):
            up, gate = np.split(layer.fc[expert] @ row, 2)
            total += weight * (layer.proj[expert] @ (up * gate / (1 + np.exp(-gate))))
        rows.append(total)
    return np.array(rows)


@pytest.mark.parametrize("form", OPERATORS)
@settings(max_examples=15, deadline=None)
@given(
    num_experts=st.integers(1, 9),
    share=st.floats(0, 1),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    num_rows=st.integers(1, 12),
    renormalises=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(num_experts=8, share=0.25, sizes=(48, 64), num_rows=40, renormalises=True, seed=0)
def test_both_forms_are_the_sum_of_the_chosen(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    num_experts: int,
    share: float,
    sizes: tuple[int, int],
    num_rows: int,
    renormalises: bool,
    seed: int,
) -> None:
    per_token = 1 + round(share * (num_experts - 1))
    layer = random_layer(num_experts, *sizes, seed)
    x = np.random.default_rng(seed).standard_normal((num_rows, sizes[1])).astype(np.float32)
    y = run(tmp_path_factory.mktemp("layer"), form, layer, x, per_token, renormalises)
    np.testing.assert_allclose(y, reference(layer, x, per_token, renormalises), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", OPERATORS)
def test_of_equal_experts_the_first_are_chosen(tmp_path: Path, form: str) -> None:
    layer = random_layer(6, 8, 16, 0)
    layer.router[:] = layer.router[3]
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    np.testing.assert_allclose(run(tmp_path, form, layer, x, 2, True), reference(layer, x, 2, True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", OPERATORS)
def test_what_a_row_did_not_choose_may_overflow(tmp_path: Path, form: str) -> None:
    """Expert 1 overflows, and nobody but the last row chooses it."""
    layer = random_layer(3, 8, 16, 0)
    layer.fc[1] = np.float32(3e38)
    layer.router[1] = 0
    layer.router[1, 0] = 100
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    x[:, 0] = -np.abs(x[:, 0])
    x[-1, 0] = 1
    y = run(tmp_path, form, layer, x, 2, True)
    assert np.isfinite(y[:-1]).all()
    assert not np.isfinite(y[-1]).any()


@pytest.mark.parametrize("form", OPERATORS)
def test_a_row_whose_router_holds_no_number_is_none(tmp_path: Path, form: str) -> None:
    """The products of its experts are finite: what is lost is how much of each it is."""
    layer = random_layer(3, 8, 16, 0)
    layer.router[:, 0] = np.float32(3e38)
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    x[:, 0] = [0, 10, 0, 0]
    y = run(tmp_path, form, layer, x, 2, True)
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, 0)).all()

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
from draftline.graphs.operators import PORTABLE, Operators
from draftline.sessions.native_kernels import find_library

OPERATORS: dict[str, Operators] = {"wide": PORTABLE, "chosen": NATIVE}
Array = NDArray[np.float32]


class Layer(NamedTuple):
    """``router [E, hidden]``, ``fc [E, 2 * ffn, hidden]`` (up above gate), ``proj [E, hidden, ffn]``.

    ``biases``: of each of them, without its last axis; none where there are none.
    """

    router: Array
    fc: Array
    proj: Array
    biases: tuple[Array, ...] = ()
    gate_limit: float | None = None


def random_layer(
    num_experts: int, size: int, hidden: int, seed: int, biases: bool = False, gate_limit: float | None = None
) -> Layer:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        values: Array = (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        return values

    shapes = (num_experts, hidden), (num_experts, 2 * size, hidden), (num_experts, hidden, size)
    router, fc, proj = (normal(*shape) for shape in shapes)
    vectors = tuple(random.standard_normal(shape[:-1]).astype(np.float32) for shape in shapes if biases)
    return Layer(router, fc, proj, vectors, gate_limit)


def run(tmp_path: Path, form: str, layer: Layer, x: Array, per_token: int, renormalises: bool) -> Array:
    num_experts, double, hidden = layer.fc.shape
    names = "mlp.router.bias", "mlp.fc.bias", "mlp.proj.bias"
    tensors = dict(zip(names[: len(layer.biases)], layer.biases, strict=True)) | {
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
    experts = Experts(num_experts, per_token, double // 2, renormalises, bool(layer.biases), layer.gate_limit)
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


def gated(layer: Layer, up: NDArray[np.float64], gate: NDArray[np.float64]) -> NDArray[np.float64]:
    if layer.gate_limit is None:
        silu: NDArray[np.float64] = up * gate / (1 + np.exp(-gate))
        return silu
    gate, up = np.minimum(gate, layer.gate_limit), np.clip(up, -layer.gate_limit, layer.gate_limit)
    clamped: NDArray[np.float64] = (1 + up) * gate / (1 + np.exp(-1.702 * gate))
    return clamped


def reference(layer: Layer, x: Array, per_token: int, renormalises: bool) -> NDArray[np.float64]:
    rows = []
    router_bias, fc_bias, proj_bias = layer.biases or (np.zeros(matrix.shape[:-1]) for matrix in layer[:3])
    for row in x.astype(np.float64):
        logits = layer.router @ row + router_bias
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        chosen = np.argsort(-probabilities, kind="stable")[:per_token]
        weights = probabilities[chosen] / (probabilities[chosen].sum() if renormalises else 1)
        total = np.zeros(len(row))
        for weight, expert in zip(weights, chosen, strict=True):
            up, gate = np.split(layer.fc[expert] @ row + fc_bias[expert], 2)
            total += weight * (layer.proj[expert] @ gated(layer, up, gate) + proj_bias[expert])
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
    biases=st.booleans(),
    gate_limit=st.sampled_from([None, 0.5, 7.0]),
    seed=st.integers(0, 2**32 - 1),
)
@example(
    num_experts=8, share=0.25, sizes=(48, 64), num_rows=40, renormalises=True, biases=False, gate_limit=None, seed=0
)
@example(num_experts=8, share=0.25, sizes=(48, 64), num_rows=40, renormalises=True, biases=True, gate_limit=1.0, seed=0)
def test_both_forms_are_the_sum_of_the_chosen(
    tmp_path_factory: pytest.TempPathFactory,
    form: str,
    num_experts: int,
    share: float,
    sizes: tuple[int, int],
    num_rows: int,
    renormalises: bool,
    biases: bool,
    gate_limit: float | None,
    seed: int,
) -> None:
    per_token = 1 + round(share * (num_experts - 1))
    layer = random_layer(num_experts, *sizes, seed, biases, gate_limit)
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
def test_clamping_hides_no_nan(tmp_path: Path, form: str) -> None:
    layer = random_layer(3, 8, 16, 0, biases=True, gate_limit=1.0)
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    x[1] = np.nan
    y = run(tmp_path, form, layer, x, 2, True)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("form", OPERATORS)
def test_the_router_s_bias_takes_part_in_the_choice(tmp_path: Path, form: str) -> None:
    layer = random_layer(6, 8, 16, 0, biases=True)
    layer.router[:] = 0
    layer.biases[0][:] = [0, 1, 0, 0, 3, 2]
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    y = run(tmp_path, form, layer, x, 2, True)
    np.testing.assert_allclose(y, reference(layer, x, 2, True), rtol=0, atol=1e-5)
    layer.fc[:4] = layer.proj[:4] = 1e3  # none of these was chosen
    np.testing.assert_array_equal(run(tmp_path, form, layer, x, 2, True), y)


@pytest.mark.parametrize("form", OPERATORS)
def test_what_a_row_did_not_choose_may_overflow(tmp_path: Path, form: str) -> None:
    """Expert 1 overflows, and nobody but the last row chooses it. A clamped gate would not let it."""
    layer = random_layer(3, 8, 16, 0, biases=True)
    layer.biases[0][:] = 0
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

"""``QuantizedMatMul`` and ``QuantizedEmbedding`` against numpy, to the last bit."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.quantization import multiply_tiles, quantize_int4_tiles, quantize_int8_tiles
from tests.plugins.native import instruction_set, open_session


class Matrix(NamedTuple):
    """Sizes, bits and seed of a random matrix."""

    num_inputs: int
    num_outputs: int
    bits: int
    seed: int

    def tensors(self) -> tuple[NDArray[Any], ...]:
        random = np.random.default_rng(self.seed)
        # Outputs of very different size, so that a scale of another output is far off.
        sizes = 2.0 ** random.integers(-12, 12, (self.num_outputs, 1))
        weight = (random.standard_normal((self.num_outputs, self.num_inputs)) * sizes).astype(np.float32)
        return quantize_int8_tiles(weight) if self.bits == 8 else quantize_int4_tiles(weight)


matrices = st.builds(
    Matrix, st.integers(1, 200), st.integers(1, 100), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1)
)
EVEN = Matrix(576, 96, 8, 0)


@lru_cache(maxsize=64)
def session(matrix: Matrix, num_threads: int = 1) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T", matrix.num_inputs])
    tensors = [graph.constant(tensor) for tensor in matrix.tensors()]
    attributes = {"bits": matrix.bits, "num_inputs": matrix.num_inputs, "num_outputs": matrix.num_outputs}
    y = graph.op("QuantizedMatMul", x, *tensors, domain=DRAFTLINE, **attributes)
    graph.output(y, "y", TensorProto.FLOAT, ["T", matrix.num_outputs])
    return open_session(graph.model("product", []), num_threads)


def multiply(matrix: Matrix, x: NDArray[np.float32], num_threads: int = 1) -> NDArray[np.float32]:
    y: NDArray[np.float32] = session(matrix, num_threads).run(None, {"x": x})[0]
    return y


def random_rows(num_rows: int, num_inputs: int, seed: int) -> NDArray[np.float32]:
    """Rows of large and of tiny values, and some zeros."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_rows, num_inputs)) * 2.0 ** random.integers(-40, 40, (num_rows, num_inputs))
    x[random.random(x.shape) < 0.2] = 0
    x[:, random.random(num_inputs) < 0.1] *= 1e-30
    return x.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(matrices, st.integers(1, 20), st.integers(0, 2**32 - 1))
@example(EVEN, 8, 0)
@example(EVEN._replace(bits=4), 8, 0)
def test_products_are_the_oracle_s(matrix: Matrix, num_rows: int, seed: int) -> None:
    x = random_rows(num_rows, matrix.num_inputs, seed)
    expected = multiply_tiles(x, *matrix.tensors())[:, : matrix.num_outputs]
    np.testing.assert_array_equal(multiply(matrix, x), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_sums_fit(bits: int) -> None:
    """All codes and inputs at their ends: nothing saturates."""
    matrix = Matrix(64, 32, bits, 0)
    codes, scales, *zeros = (np.full_like(tensor, 1) for tensor in matrix.tensors())
    x = np.ones((3, 64), np.float32)
    for code in (1, 255):
        codes[:] = code if bits == 8 else code // 16 * 17
        graph = OnnxGraph()
        value = graph.input("x", TensorProto.FLOAT, ["T", 64])
        tensors = [graph.constant(tensor) for tensor in (codes, scales, *zeros)]
        y = graph.op("QuantizedMatMul", value, *tensors, domain=DRAFTLINE, bits=bits, num_inputs=64, num_outputs=32)
        graph.output(y, "y", TensorProto.FLOAT, ["T", 32])
        expected = multiply_tiles(x, codes, scales, *zeros)
        np.testing.assert_array_equal(open_session(graph.model("product", [])).run(None, {"x": x})[0], expected)


@settings(max_examples=30, deadline=None)
@given(matrices, st.integers(2, 40), st.integers(0, 2**32 - 1), st.data())
@example(EVEN, 200, 0, None)
@example(EVEN._replace(bits=4), 200, 0, None)
def test_a_row_is_multiplied_alike_in_any_batch(
    matrix: Matrix, num_rows: int, seed: int, data: st.DataObject | None
) -> None:
    x = random_rows(num_rows, matrix.num_inputs, seed)
    together = multiply(matrix, x, 2)
    row = data.draw(st.integers(0, num_rows - 1)) if data else num_rows - 1
    np.testing.assert_array_equal(multiply(matrix, x[row : row + 1])[0], together[row])


@settings(max_examples=30, deadline=None)
@given(matrices, st.integers(1, 20), st.integers(0, 2**32 - 1))
@example(EVEN, 13, 0)
@example(EVEN._replace(bits=4), 13, 0)
def test_instruction_sets_multiply_alike(matrix: Matrix, num_rows: int, seed: int) -> None:
    x = random_rows(num_rows, matrix.num_inputs, seed)
    expected = multiply(matrix, x)
    with instruction_set("avx2") as has_it:
        if not has_it:
            pytest.skip("a processor without AVX2")
        np.testing.assert_array_equal(multiply(matrix, x), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["avx512_vnni", "avx2", "neon_dotprod", "neon"])
def test_a_row_that_is_not_finite_is_nan_and_no_other(value: float, bits: int, name: str) -> None:
    """With one such input, in any place of a block, of the last one too, or with all."""
    matrix = Matrix(83, 35, bits, 1)
    rows = random_rows(20, 83, 2)
    expected = multiply(matrix, rows)
    with instruction_set(name) as has_it:
        if not has_it:
            return
        for place in (*range(83), slice(None)):
            x = rows.copy()
            x[[3, 17], place] = value
            y = multiply(matrix, x)
            assert np.isnan(y[[3, 17]]).all()
            np.testing.assert_array_equal(np.delete(y, [3, 17], axis=0), np.delete(expected, [3, 17], axis=0))
            np.testing.assert_array_equal(multiply_tiles(x[3:4], *matrix.tensors())[0, :35], y[3])


def test_inputs_just_below_infinity_are_numbers() -> None:
    x = np.full((1, 83), np.finfo(np.float32).max)
    x[0, ::2] = 1
    weight = np.full((16, 83), 1e-3, np.float32)
    for tensors in (quantize_int8_tiles(weight), quantize_int4_tiles(weight)):
        assert np.isfinite(multiply_tiles(x, *tensors)).all()
    matrix = Matrix(83, 35, 8, 1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = multiply_tiles(x, *matrix.tensors())[:, :35]
    np.testing.assert_array_equal(multiply(matrix, x), expected)


def test_no_rows() -> None:
    assert multiply(EVEN, np.empty((0, 576), np.float32)).shape == (0, 96)


@pytest.mark.parametrize("bits", [8, 4])
def test_no_rows_from_another_node(bits: int) -> None:
    """Whose output has no memory, where that of an input has some."""
    matrix, graph = EVEN._replace(bits=bits), OnnxGraph()
    tensors = [graph.constant(tensor) for tensor in matrix.tensors()]
    x = graph.op("Abs", graph.input("x", TensorProto.FLOAT, ["T", 576]))
    y = graph.op("QuantizedMatMul", x, *tensors, domain=DRAFTLINE, bits=bits, num_inputs=576, num_outputs=96)
    graph.output(y, "y", TensorProto.FLOAT, ["T", 96])
    if bits == 8:
        ids = graph.op("Abs", graph.input("ids", TensorProto.INT32, ["T"]))
        rows = graph.op("QuantizedEmbedding", *tensors, ids, domain=DRAFTLINE, num_inputs=576)
        graph.output(rows, "rows", TensorProto.FLOAT, ["T", 576])
    inputs = {"x": np.empty((0, 576), np.float32), "ids": np.empty(0, np.int32)}
    model = open_session(graph.model("product", []))
    outputs = model.run(None, {x.name: inputs[x.name] for x in model.get_inputs()})
    assert [output.shape for output in outputs] == [(0, 96), (0, 576)][: len(outputs)]


def lookup(matrix: Matrix, ids: list[int], num_inputs: int | None = None) -> NDArray[np.float32]:
    graph = OnnxGraph()
    codes, scales = (graph.constant(tensor) for tensor in matrix.tensors())
    value = graph.input("ids", TensorProto.INT32, ["T"])
    attributes = {"num_inputs": num_inputs or matrix.num_inputs}
    rows = graph.op("QuantizedEmbedding", codes, scales, value, domain=DRAFTLINE, **attributes)
    graph.output(rows, "rows", TensorProto.FLOAT, ["T", "in"])
    model = open_session(graph.model("lookup", []))
    out: NDArray[np.float32] = model.run(None, {"ids": np.array(ids, np.int32)})[0]
    return out


@settings(max_examples=30, deadline=None)
@given(matrices, st.data())
def test_lookups(matrix: Matrix, data: st.DataObject) -> None:
    matrix = matrix._replace(bits=8)
    ids = data.draw(st.lists(st.integers(0, matrix.num_outputs - 1), min_size=1, max_size=5))
    codes, scales = matrix.tensors()
    values = (codes.astype(np.float32) - 128) * scales[:, :, None, :, None]
    expected = values.transpose(0, 3, 1, 2, 4).reshape(len(codes) * 16, -1)[ids, : matrix.num_inputs]
    np.testing.assert_array_equal(lookup(matrix, ids), expected)


def test_many_lookups_are_those_of_one() -> None:
    ids = np.random.default_rng(0).integers(0, 96, 100).tolist()
    np.testing.assert_array_equal(lookup(EVEN, ids), np.concatenate([lookup(EVEN, [row]) for row in ids]))


@pytest.mark.parametrize("row", [-1, 96])
def test_ids_outside_the_table_are_refused(row: int) -> None:
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match=f"a row of the table; got {row}"):
        lookup(EVEN, [row])


def test_tensors_of_other_shapes_are_refused() -> None:
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="codes has the shape 6 19 8 16 4"):
        lookup(EVEN, [0], num_inputs=577)

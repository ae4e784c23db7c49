"""``Linear`` against numpy, and its bits in any batch, with any number of threads, on any instruction set."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph
from tests.plugins.native import instruction_set, open_session

EPSILON = 2.0**-24  # of one float32 operation, relative


class Matrix(NamedTuple):
    """Sizes and seed of a random matrix; its outputs are of very different size."""

    num_inputs: int
    num_outputs: int
    seed: int

    def weight(self) -> NDArray[np.float32]:
        random = np.random.default_rng(self.seed)
        sizes = 2.0 ** random.integers(-12, 12, (self.num_outputs, 1))
        return (random.standard_normal((self.num_outputs, self.num_inputs)) * sizes).astype(np.float32)


matrices = st.builds(Matrix, st.integers(1, 200), st.integers(1, 100), st.integers(0, 2**32 - 1))
SEVERAL_CHUNKS = Matrix(1601, 23, 0)  # of inputs; outputs are no whole groups


@lru_cache(maxsize=64)
def session(matrix: Matrix, num_threads: int = 1) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T", matrix.num_inputs])
    y = NATIVE.product(graph, x, graph.constant(matrix.weight()), "product")
    graph.output(y, "y", TensorProto.FLOAT, ["T", matrix.num_outputs])
    return open_session(graph.model("product", []), num_threads)


def multiply(matrix: Matrix, x: NDArray[np.float32], num_threads: int = 1) -> NDArray[np.float32]:
    y: NDArray[np.float32] = session(matrix, num_threads).run(None, {"x": x})[0]
    return y


def random_rows(num_rows: int, num_inputs: int, seed: int) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_rows, num_inputs)) * 2.0 ** random.integers(-20, 20, (num_rows, num_inputs))
    return x.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(matrices, st.integers(1, 20), st.integers(0, 2**32 - 1))
@example(Matrix(1, 1, 0), 1, 0)
@example(Matrix(15, 15, 0), 7, 0)
@example(Matrix(17, 17, 0), 13, 0)
@example(Matrix(577, 577, 0), 6, 0)
@example(SEVERAL_CHUNKS, 70, 0)
def test_products_are_numpy_s(matrix: Matrix, num_rows: int, seed: int) -> None:
    """Each of the 16 lanes rounds once an input, the tree four times: within (in / 16 + 5) roundings of the sum."""
    x, weight = random_rows(num_rows, matrix.num_inputs, seed), matrix.weight().astype(np.float64)
    bound = np.abs(x).astype(np.float64) @ np.abs(weight).T * (matrix.num_inputs / 16 + 5) * EPSILON
    difference = np.abs(multiply(matrix, x) - x.astype(np.float64) @ weight.T)
    assert (difference <= bound).all(), (difference / bound).max()


@settings(max_examples=30, deadline=None)
@given(matrices, st.integers(2, 130), st.integers(0, 2**32 - 1))
@example(SEVERAL_CHUNKS, 130, 0)
@example(Matrix(577, 577, 0), 67, 0)
def test_a_row_is_multiplied_alike_in_any_batch(matrix: Matrix, num_rows: int, seed: int) -> None:
    x = random_rows(num_rows, matrix.num_inputs, seed)
    alone = np.concatenate([multiply(matrix, x[row : row + 1]) for row in range(num_rows)])
    np.testing.assert_array_equal(multiply(matrix, x), alone)
    np.testing.assert_array_equal(multiply(matrix, x[: num_rows // 2], 2), alone[: num_rows // 2])


def test_every_number_of_rows_gives_the_same_bits() -> None:
    matrix = Matrix(70, 37, 0)
    x = random_rows(130, matrix.num_inputs, 0)
    alone = np.concatenate([multiply(matrix, x[row : row + 1]) for row in range(len(x))])
    for num_rows in range(2, len(x) + 1):
        np.testing.assert_array_equal(multiply(matrix, x[:num_rows]), alone[:num_rows])


@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_threads_multiply_alike(num_rows: int) -> None:
    matrix = Matrix(576, 1000, 0)
    x = random_rows(num_rows, matrix.num_inputs, 0)
    expected = multiply(matrix, x)
    for num_threads in (2, 8):
        np.testing.assert_array_equal(multiply(matrix, x, num_threads), expected)


@settings(max_examples=30, deadline=None)
@given(matrices, st.integers(1, 20), st.integers(0, 2**32 - 1))
@example(SEVERAL_CHUNKS, 70, 0)
def test_instruction_sets_multiply_alike(matrix: Matrix, num_rows: int, seed: int) -> None:
    x = random_rows(num_rows, matrix.num_inputs, seed)
    expected = multiply(matrix, x)
    with instruction_set("avx2") as has_it:
        if not has_it:
            pytest.skip("a processor without AVX2")
        np.testing.assert_array_equal(multiply(matrix, x), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("num_inputs", [577, 1601])
def test_what_is_not_finite_stays_in_its_row(num_inputs: int, value: float) -> None:
    matrix = Matrix(num_inputs, 23, 0)
    x = random_rows(9, num_inputs, 0)
    expected = multiply(matrix, x)
    x[4, -1] = value
    changed = multiply(matrix, x)
    assert not np.isfinite(changed[4]).any()
    np.testing.assert_array_equal(np.delete(changed, 4, 0), np.delete(expected, 4, 0))


def test_no_rows() -> None:
    assert multiply(SEVERAL_CHUNKS, np.empty((0, 1601), np.float32)).shape == (0, 23)


def test_other_sizes_are_refused() -> None:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["T", 3])
    y = NATIVE.product(graph, x, graph.constant(np.ones((2, 4), np.float32)), "product")
    graph.output(y, "y", TensorProto.FLOAT, ["T", 2])
    model = open_session(graph.model("product", []))
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="same number of columns; got 3 and 4"):
        model.run(None, {"x": np.ones((1, 3), np.float32)})

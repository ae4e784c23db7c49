"""``ChosenLinear`` and ``ChosenQuantizedMatMul``: bit for bit the products of one row with one matrix after another."""

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
from draftline.quantization import quantize_int4_tiles, quantize_int8_tiles
from tests.plugins.native import instruction_set, open_session


class Matrices(NamedTuple):
    """Sizes and seed of random matrices; ``bits`` 32 = float32."""

    count: int
    num_inputs: int
    num_outputs: int
    bits: int
    seed: int

    def tensors(self) -> list[tuple[NDArray[Any], ...]]:
        """Of one matrix after another."""
        random = np.random.default_rng(self.seed)
        weights = random.standard_normal((self.count, self.num_outputs, self.num_inputs)).astype(np.float32)
        quantize = {32: lambda weight: (weight,), 8: quantize_int8_tiles, 4: quantize_int4_tiles}[self.bits]
        return [quantize(weight) for weight in weights]

    @property
    def attributes(self) -> dict[str, int]:
        if self.bits == 32:
            return {}
        return {"bits": self.bits, "num_inputs": self.num_inputs, "num_outputs": self.num_outputs}


some_matrices = st.builds(
    Matrices,
    st.integers(1, 6),
    st.integers(1, 100),
    st.integers(1, 100),
    st.sampled_from([4, 8, 32]),
    st.integers(0, 2**32 - 1),
)


@lru_cache(maxsize=64)
def session(matrices: Matrices, num_threads: int = 1) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["R", matrices.num_inputs])
    ids = graph.input("ids", TensorProto.INT64, ["N"])
    tensors = [graph.constant(np.stack(parts)) for parts in zip(*matrices.tensors(), strict=True)]
    op = "ChosenLinear" if matrices.bits == 32 else "ChosenQuantizedMatMul"
    y = graph.op(op, x, ids, *tensors, domain=DRAFTLINE, **matrices.attributes)
    graph.output(y, "y", TensorProto.FLOAT, ["N", matrices.num_outputs])
    return open_session(graph.model("product", []), num_threads)


@lru_cache(maxsize=64)
def one_matrix_session(matrices: Matrices, index: int) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    x = graph.input("x", TensorProto.FLOAT, ["R", matrices.num_inputs])
    tensors = [graph.constant(tensor) for tensor in matrices.tensors()[index]]
    op = "Linear" if matrices.bits == 32 else "QuantizedMatMul"
    y = graph.op(op, x, *tensors, domain=DRAFTLINE, **matrices.attributes)
    graph.output(y, "y", TensorProto.FLOAT, ["R", matrices.num_outputs])
    return open_session(graph.model("product", []))


def multiply(
    matrices: Matrices, x: NDArray[np.float32], ids: NDArray[np.int64], num_threads: int = 1
) -> NDArray[np.float32]:
    y: NDArray[np.float32] = session(matrices, num_threads).run(None, {"x": x, "ids": ids})[0]
    return y


def random_inputs(
    matrices: Matrices, num_rows: int, num_choices: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_rows, matrices.num_inputs)) * 2.0 ** random.integers(-20, 20, (num_rows, 1))
    return x.astype(np.float32), random.integers(0, matrices.count, num_rows * num_choices)


def one_by_one(matrices: Matrices, x: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.float32]:
    rows = np.repeat(x, len(ids) // len(x), axis=0)
    return np.concatenate(
        [
            one_matrix_session(matrices, index).run(None, {"x": row[None]})[0]
            for row, index in zip(rows, ids.tolist(), strict=True)
        ]
    )


@settings(max_examples=60, deadline=None)
@given(some_matrices, st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32 - 1))
@example(Matrices(2, 64, 32, 8, 0), 40, 1, 0)
@example(Matrices(2, 64, 33, 4, 0), 40, 2, 0)
@example(Matrices(3, 1601, 23, 32, 0), 90, 1, 0)
def test_a_row_is_multiplied_as_alone(matrices: Matrices, num_rows: int, num_choices: int, seed: int) -> None:
    x, ids = random_inputs(matrices, num_rows, num_choices, seed)
    expected = one_by_one(matrices, x, ids)
    np.testing.assert_array_equal(multiply(matrices, x, ids), expected)
    with instruction_set("avx2") as has_it:
        if has_it:
            np.testing.assert_array_equal(multiply(matrices, x, ids), expected)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_threads_multiply_alike(bits: int) -> None:
    """Enough inputs for rows to be quantised by several threads, and enough outputs for several pieces of a matrix."""
    matrices = Matrices(5, 576, 1000, bits, 0)
    x, ids = random_inputs(matrices, 67, 2, 0)
    expected = multiply(matrices, x, ids)
    np.testing.assert_array_equal(expected[:20], one_by_one(matrices, x[:10], ids[:20]))
    for num_threads in (2, 8):
        np.testing.assert_array_equal(multiply(matrices, x, ids, num_threads), expected)


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_what_is_not_finite_stays_in_its_row(bits: int) -> None:
    matrices = Matrices(3, 70, 20, bits, 0)
    x, ids = random_inputs(matrices, 9, 2, 0)
    expected = multiply(matrices, x, ids)
    x[4, -1] = np.nan
    changed = multiply(matrices, x, ids)
    assert np.isnan(changed[8:10]).all()
    np.testing.assert_array_equal(np.delete(changed, [8, 9], 0), np.delete(expected, [8, 9], 0))


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_no_rows(bits: int) -> None:
    empty = np.empty((0, 70), np.float32)
    assert multiply(Matrices(3, 70, 20, bits, 0), empty, np.empty(0, np.int64)).shape == (0, 20)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 3], "ids are 0 .. 2; got 3"),
        ([0, -1], "ids are 0 .. 2; got -1"),
        ([0, 1, 2], "as many ids a row of x; got 3 for 2"),
        ([], "as many ids a row of x; got 0 for 2"),
    ],
)
def test_wrong_choices_are_refused(bits: int, ids: list[int], message: str) -> None:
    matrices = Matrices(3, 70, 20, bits, 0)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match=message):
        multiply(matrices, np.ones((2, 70), np.float32), np.array(ids, np.int64))

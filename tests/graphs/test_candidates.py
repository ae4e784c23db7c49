"""The k most probable tokens of a row, and the offsets of a draft's own vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.candidates import output_candidates, target_ids
from draftline.graphs.native_operators import NATIVE
from draftline.graphs.onnx_graph import OnnxGraph
from draftline.graphs.operators import PORTABLE, Operators
from tests.plugins.native import open_session

both_forms = pytest.mark.parametrize("operators", [PORTABLE, NATIVE], ids=["portable", "native"])


def run(
    operators: Operators, logits: NDArray[np.float32], k: int, offsets: NDArray[np.int64] | None = None
) -> list[NDArray[Any]]:
    graph = OnnxGraph()
    value = graph.input("logits", TensorProto.FLOAT, ["R", logits.shape[1]])
    ids, log_probs = operators.candidates(graph, value, k)
    if offsets is not None:
        ids = target_ids(graph, ids, graph.constant(offsets, "d2t"))
    output_candidates(graph, ids, log_probs, k)
    outputs: list[NDArray[Any]] = open_session(graph.model("test", [])).run(
        ["candidate_ids", "candidate_log_probs"], {"logits": logits}
    )
    return outputs


@both_forms
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(5, 200), st.data())
def test_candidates_are_the_best_of_a_log_softmax(
    operators: Operators, seed: int, rows: int, vocab_size: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, vocab_size))
    logits = np.random.default_rng(seed).standard_normal((rows, vocab_size)).astype(np.float32) * 5
    ids, log_probs = run(operators, logits, k)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert all(len(set(row)) == k for row in ids.tolist())
    # By value: the rounding of the softmax may make two tokens equal that were not.
    np.testing.assert_allclose(log_probs, -np.sort(-expected, axis=1)[:, :k], rtol=0, atol=1e-5)
    np.testing.assert_allclose(log_probs, np.take_along_axis(expected, ids, axis=1), rtol=0, atol=1e-5)


@both_forms
def test_of_equal_tokens_the_first_comes_first(operators: Operators) -> None:
    ids, _ = run(operators, np.array([[1, 3, 3, 0, 3]], np.float32), 4)
    assert ids.tolist() == [[1, 2, 4, 0]]


@both_forms
def test_offsets_lead_to_ids_of_the_target(operators: Operators) -> None:
    """Three draft tokens stand for the tokens 2, 5 and 9 of the target."""
    ids, log_probs = run(operators, np.array([[0.0, 2.0, 1.0]], np.float32), 2, np.array([2, 4, 7]))
    assert ids.tolist() == [[5, 9]]
    assert np.exp(log_probs).sum() == pytest.approx((np.e**2 + np.e) / (np.e**2 + np.e + 1))

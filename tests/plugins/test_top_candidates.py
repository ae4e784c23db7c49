"""``TopCandidates`` beyond what ``tests/graphs/test_candidates.py`` asks: exact order, laws, errors."""

from __future__ import annotations

from functools import lru_cache

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
from tests.plugins.test_sample import awkward_logits

FAIL = onnxruntime.capi.onnxruntime_pybind11_state.Fail


@lru_cache(maxsize=64)
def session(num_candidates: int, num_threads: int) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    logits = graph.input("logits", TensorProto.FLOAT, ["R", "V"])
    ids, log_probs = NATIVE.candidates(graph, logits, num_candidates)
    graph.output(ids, "ids", TensorProto.INT64, ["R", num_candidates])
    graph.output(log_probs, "log_probs", TensorProto.FLOAT, ["R", num_candidates])
    return open_session(graph.model("candidates", []), num_threads)


def choose(
    logits: NDArray[np.float32], num_candidates: int, num_threads: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids, log_probs = session(num_candidates, num_threads).run(None, {"logits": logits})
    return ids, log_probs


def expect(logits: NDArray[np.float32], num_candidates: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The oracle: a stable sort, and a log-softmax in float64."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :num_candidates]
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return ids, np.take_along_axis(log_probs, ids, axis=1)


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 1500), st.integers(1, 5), st.integers(0, 2**32 - 1), st.data())
@example(49152, 2, 1, None)
def test_candidates_are_those_of_a_stable_sort(
    vocab_size: int, num_rows: int, seed: int, data: st.DataObject | None
) -> None:
    k = data.draw(st.one_of(st.integers(1, min(64, vocab_size)), st.integers(1, vocab_size))) if data else 40
    logits = awkward_logits((num_rows, vocab_size), seed)
    ids, log_probs = choose(logits, k, 2)
    expected_ids, expected_log_probs = expect(logits, k)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(log_probs, expected_log_probs, rtol=3e-7, atol=1e-6)
    for row in range(num_rows):
        alone = choose(logits[row : row + 1], k)
        np.testing.assert_array_equal(alone[0][0], ids[row])
        np.testing.assert_array_equal(alone[1][0], log_probs[row])
    with instruction_set("avx2"):
        for found, wanted in zip(choose(logits, k), (ids, log_probs), strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("scales", [(1e-38, 1e-42), (3e38, 1e-38), (8.0, 1e-6), (1e30, 1.0, 1e-5), (1.0, 0.0)])
def test_thousands_of_nearly_equal_logits_are_told_apart(scales: tuple[float, ...]) -> None:
    """Clusters within clusters of 20,000 tokens: too many for one histogram, whatever its range."""
    random = np.random.default_rng(3)
    logits = np.zeros(20_000, np.float64)
    for scale in scales:
        logits += random.choice([-1.0, 0.0, 0.0, 0.0, 1.0], logits.size) * scale / 3
    logits += random.random(logits.size) * scales[-1] / 3
    rows = logits.astype(np.float32)[None]
    for k in (1, 300, 320, 5000, 12_345, 20_000):
        np.testing.assert_array_equal(choose(rows, k)[0], expect(rows, k)[0])


def test_no_rows() -> None:
    ids, log_probs = choose(np.empty((0, 9), np.float32), 4)
    assert ids.shape == log_probs.shape == (0, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_without_a_distribution_gives_tokens_that_are_no_candidates(value: float) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    ids, log_probs = choose(logits, 4)
    logits[1, 69] = value
    found_ids, found_log_probs = choose(logits, 4)
    np.testing.assert_array_equal(found_ids, [ids[0], range(4), ids[2]])
    np.testing.assert_array_equal(found_log_probs, [log_probs[0], [-np.inf] * 4, log_probs[2]])


def test_more_candidates_than_tokens_are_refused() -> None:
    with pytest.raises(FAIL, match="at most V; got 8 of 7"):
        choose(np.zeros((1, 7), np.float32), 8)

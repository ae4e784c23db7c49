"""Perplexity and divergence, against the textbook in float64."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.stages import perplexity
from draftline.stages.perplexity import RowScores, describe_report, log_softmax, score_rows, summarise_scores


@st.composite
def two_networks(draw: st.DrawFn) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Draw logits ``[T, V]`` of two networks, as far apart as may be, and the next tokens ``[T]``."""
    num_rows, vocab_size = draw(st.integers(1, 5)), draw(st.integers(2, 40))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, noise = draw(st.sampled_from([0.0, 1.0, 30.0])), draw(st.sampled_from([0.0, 0.01, 10.0]))
    logits = (generator.standard_normal((num_rows, vocab_size)) * spread).astype(np.float32)
    other = (logits + generator.standard_normal(logits.shape) * noise).astype(np.float32)
    return other, logits, generator.integers(vocab_size, size=num_rows)


@given(two_networks())
def test_scores_are_those_of_the_textbook(
    networks: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]],
) -> None:
    logits, float32_logits, next_ids = networks
    scores = score_rows(log_softmax(logits), log_softmax(float32_logits), next_ids)
    for row, next_id in enumerate(next_ids):
        q, p = (np.exp(x[row].astype(np.float64) - x[row].max()) for x in (logits, float32_logits))
        q, p = q / q.sum(), p / p.sum()
        assert scores.nll[row] == pytest.approx(-math.log(q[next_id]), rel=1e-5, abs=1e-5)
        assert scores.float32_nll[row] == pytest.approx(-math.log(p[next_id]), rel=1e-5, abs=1e-5)
        assert scores.kl_divergence[row] == pytest.approx(float(np.sum(p * np.log(p / q))), rel=1e-4, abs=1e-5)
        if np.ptp(logits[row]) and np.ptp(float32_logits[row]):
            assert scores.same_greedy[row] == (q.argmax() == p.argmax())


def test_the_example() -> None:
    assert doctest.testmod(perplexity).failed == 0


def scores(nll: list[float], float32_nll: list[float], same: list[bool]) -> RowScores:
    return RowScores(np.array(nll), np.array(float32_nll), np.array(same), np.array(nll) - float32_nll)


def test_a_model_that_knows_something_is_not_called_random() -> None:
    assert not summarise_scores([scores([math.log(19)], [0.0], [True])], 320, rounds=False).looks_random


def test_a_summary_counts_positions_not_passages() -> None:
    parts = [scores([1.0], [0.5], [True]), scores([2.0, 3.0, 2.0], [1.5, 2.5, 1.5], [True, False, True])]
    report = summarise_scores(parts, 320, rounds=True)
    assert (report.num_tokens, report.nll, report.perplexity) == (4, 2.0, 7.389)
    assert report.float32 is not None
    assert (report.float32.nll, report.float32.perplexity, report.float32.nll_increase) == (1.5, 4.482, 0.5)
    assert (report.float32.same_greedy_tokens, report.float32.kl_divergence) == (0.75, 0.5)
    assert not report.looks_random
    assert list(describe_report(report, "int8")) == [
        "perplexity 7.389 in int8, 4.482 in float32 (+64.9%); the same greedy token at 75.0% of 4 positions"
    ]


@pytest.mark.parametrize("nll", [math.log(21), math.log(320), 1e30])
def test_noise_is_pointed_at(nll: float) -> None:
    report = summarise_scores([scores([nll], [nll], [True])], 320, rounds=False)
    assert report.looks_random
    assert report.float32 is None
    assert math.isfinite(report.perplexity)
    first, second = describe_report(report, "float32")
    assert first.endswith(" in float32")
    assert second.startswith("so high a perplexity is that of damaged weights, or ")

from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.sampling
from draftline.sampling import draw, kept_probabilities, log_probs_of, sample_reference, stream, uniform

logit_rows = st.lists(st.integers(-6, 6).map(float), min_size=1, max_size=40)
seeds = st.integers(0, 2**64 - 1)
PINNED = [[10946269.0, 11764387.0, 6494865.0], [6144522.0, 12428646.0, 13633524.0]]


@settings(deadline=None)
@given(seeds, st.lists(st.integers(0, 2**40), max_size=20))
def test_uniform_depends_on_seed_and_position_only(seed: int, positions: list[int]) -> None:
    together = uniform(seed, positions)
    assert together.dtype == np.float32
    assert together.tolist() == [float(uniform(seed, position)) for position in positions]
    assert uniform(np.full(len(positions), seed, np.uint64), positions).tolist() == together.tolist()
    assert (
        draw(stream(np.full(len(positions), seed, np.uint64)), np.array(positions, np.int64)).tolist()
        == together.tolist()
    )
    assert np.all((together >= 0) & (together < 1))
    assert np.all(together * 2.0**24 == np.floor(together * 2.0**24))


def test_uniform_is_pinned() -> None:
    """A change of these numbers changes every sampled text of every user."""
    assert (uniform(0, [0, 1, 2]) * 2.0**24).tolist() == PINNED[0]
    assert (uniform(2**64 - 1, [0, 1, 2**32]) * 2.0**24).tolist() == PINNED[1]


def test_uniform_is_uniform_and_uncorrelated_between_seeds_and_positions() -> None:
    values = uniform(np.arange(300, dtype=np.uint64)[:, None], np.arange(300)).astype(np.float64)
    counts = np.histogram(values, bins=64, range=(0, 1))[0]
    expected = values.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-squared, 63 degrees of freedom: p < 1e-5
    for neighbour in (values[1:] * values[:-1], values[:, 1:] * values[:, :-1]):
        assert abs(neighbour.mean() - 0.25) < 0.005


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[bool]:
    scaled = [logit / temperature for logit in logits]
    kept = [True] * len(scaled)
    if 0 < top_k < len(scaled):
        smallest = sorted(scaled, reverse=True)[top_k - 1]
        kept = [value >= smallest for value in scaled]
    weights = [np.exp(value - max(scaled)) if keep else 0.0 for value, keep in zip(scaled, kept, strict=True)]
    total = sum(weights)
    if top_p < 1:
        above = [sum(other for other in weights if other > weight) / total for weight in weights]
        kept = [keep and mass < top_p for keep, mass in zip(kept, above, strict=True)]
    return kept


@settings(deadline=None)
@given(
    logit_rows, st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 45), st.sampled_from([0.013, 0.31, 0.77, 0.951, 1.0])
)
def test_kept_tokens_follow_the_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    probabilities = kept_probabilities(logits, temperature, top_k, top_p)
    assert (probabilities > 0).tolist() == naive_kept(logits, temperature, top_k, top_p)


@settings(deadline=None)
@given(logit_rows, st.integers(0, 45), st.sampled_from([0.31, 0.951, 1.0]), st.integers(0, 2**24 - 1))
def test_the_drawn_token_brackets_the_random_number(logits: list[float], top_k: int, top_p: float, bits: int) -> None:
    number = bits / 2**24
    token_id = sample_reference(logits, 0.8, top_k, top_p, number)
    probabilities = kept_probabilities(logits, 0.8, top_k, top_p)
    assert probabilities[token_id] > 0
    total = np.cumsum(probabilities)[-1]
    assert probabilities[:token_id].sum() <= number * total + 1e-12
    assert probabilities[: token_id + 1].sum() > number * total - 1e-12


def test_the_documentation_is_true() -> None:
    assert doctest.testmod(draftline.sampling).failed == 0


def test_frequencies_are_the_distribution() -> None:
    logits = [0.0, 1.0, -1.0, 0.5]
    drawn = [sample_reference(logits, 0.7, 0, 1.0, float(number)) for number in uniform(3, np.arange(20_000))]
    frequencies = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(frequencies - kept_probabilities(logits, 0.7, 0, 1.0)).max() < 0.012


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-24])
def test_ties_and_zero_mass(number: float) -> None:
    assert sample_reference([1.0, 2.0, 2.0], 0.0, 1, 0.1, number) == 1
    assert sample_reference([-np.inf, 0.0, -np.inf], 1.0, 0, 1.0, number) == 1
    assert sample_reference([5.0, 9.0, 1.0], 1.0, 1, 1.0, number) == 1
    assert sample_reference([0.0, 3.0, 3.0, 0.0], 1.0, 1, 1.0, number) == (1 if number < 0.5 else 2)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=7, max_size=7), min_size=1, max_size=5), st.data())
def test_log_probs_are_those_of_the_softmax(rows: list[list[float]], data: st.DataObject) -> None:
    logits = np.array(rows, np.float32)
    token_ids = [data.draw(st.integers(0, 6)) for _ in rows]
    log_probs = log_probs_of(logits, token_ids)
    assert log_probs.dtype == np.float32
    for row, token_id, log_prob in zip(logits, token_ids, log_probs, strict=True):
        wide = row.astype(np.float64)
        expected = wide[token_id] - np.logaddexp.reduce(wide)
        assert log_prob == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert log_prob == log_probs_of(row[None], [token_id])[0]


def test_log_probs_of_extreme_logits() -> None:
    logits = np.array([[1e38, -1e38, 0], [-np.inf, 0, 0], [1e4, 1e4, -np.inf], [-90, 0, 0]], np.float32)
    log_probs = log_probs_of(logits, [0, 1, 0, 0])
    np.testing.assert_allclose(log_probs, [0, -np.log(2), -np.log(2), -90 - np.log(2)], rtol=1e-6)
    assert log_probs_of(logits[:0], []).shape == (0,)

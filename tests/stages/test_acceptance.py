"""Rates of acceptance, what they would be at random, and which of two is better."""

from __future__ import annotations

import doctest

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.stages.acceptance
from draftline.stages.acceptance import Proposals, is_better, propose

SEEDS = st.integers(0, 2**32 - 1)


def test_examples() -> None:
    assert doctest.testmod(draftline.stages.acceptance).failed == 0


@settings(deadline=None)
@given(SEEDS, st.integers(1, 60), st.integers(1, 5))
def test_chance_is_the_mean_over_all_orders(seed: int, count: int, num_tokens: int) -> None:
    """The expectation over permutations is the mean over all pairs of positions."""
    generator = np.random.default_rng(seed)
    choices, proposed = generator.integers(0, num_tokens, (2, count))
    pairs = (choices[:, None] == proposed[None]).mean()
    np.testing.assert_allclose(Proposals(choices, proposed, np.zeros(count)).chance, pairs)


@settings(deadline=None)
@given(SEEDS)
def test_a_shuffled_draft_is_near_chance_and_a_learned_one_is_not(seed: int) -> None:
    generator = np.random.default_rng(seed)
    choices = np.sort(generator.geometric(0.2, 400))
    rotated = np.roll(choices, 200)  # the same tokens, nearly nowhere where they belong
    nothing = np.zeros(400)
    assert Proposals(choices, rotated, nothing).is_near_chance()
    learned = np.where(generator.random(400) < 0.4, choices, rotated)
    assert not Proposals(choices, learned, nothing).is_near_chance()


@settings(deadline=None)
@given(SEEDS, st.floats(0, 0.2))
def test_a_better_draft_gives_the_choices_more_probability_by_three_standard_errors(seed: int, gain: float) -> None:
    generator = np.random.default_rng(seed)
    choices, base = np.zeros(300, np.int64), generator.random(300) * 0.5
    better = base + gain + generator.standard_normal(300) * 0.1
    left, right = (Proposals(choices, choices, values) for values in (better, base))
    differences = better - base
    assert is_better(left, right) == (differences.mean() > 3 * differences.std() / np.sqrt(300))
    assert not (is_better(left, right) and is_better(right, left))
    assert not is_better(left, left)


def test_a_proposal_is_the_first_candidate_and_confidence_that_of_the_choice() -> None:
    candidates = np.array([[4, 5], [6, 4], [7, 8]], np.int32)
    found = propose(np.array([4, 4, 4]), candidates, np.log(np.array([[0.6, 0.3]] * 3, np.float32)))
    assert found.proposed.tolist() == [4, 6, 7]
    np.testing.assert_allclose(found.confidence, [0.6, 0.3, 0.0], atol=1e-6)
    assert str(found) == "33.3% (probability 0.300)"

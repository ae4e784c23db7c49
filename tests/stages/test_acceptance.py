"""Rates of acceptance, what they would be at random, and which of two is better."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import draftline.stages.acceptance
from draftline.stages.acceptance import BLOCK_POSITIONS, Candidates, Proposals, gain_in_errors, propose

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
    np.testing.assert_allclose(Proposals(choices, proposed, np.zeros(count), (count,)).chance, pairs)


@settings(deadline=None)
@given(SEEDS)
def test_a_shuffled_draft_is_near_chance_and_a_learned_one_is_not(seed: int) -> None:
    generator = np.random.default_rng(seed)
    choices = np.sort(generator.geometric(0.2, 400))
    rotated = np.roll(choices, 200)  # the same tokens, nearly nowhere where they belong
    nothing, lengths = np.zeros(400), (400,)
    assert Proposals(choices, rotated, nothing, lengths).is_near_chance()
    learned = np.where(generator.random(400) < 0.4, choices, rotated)
    assert not Proposals(choices, learned, nothing, lengths).is_near_chance()


@settings(deadline=None)
@given(SEEDS, st.lists(st.integers(1, 70), min_size=1, max_size=8), st.floats(-0.05, 0.05))
def test_a_gain_is_the_mean_of_blocks_in_their_standard_errors(seed: int, lengths: list[int], gain: float) -> None:
    """Blocks are parts of one answer, of about 16 positions, and weigh the same."""
    generator = np.random.default_rng(seed)
    count = sum(lengths)
    base = generator.random(count) * 0.5
    left, right = (proposals(values, lengths) for values in (base + gain + generator.normal(0, 0.1, count), base))
    means, first = [], 0
    for length in lengths:
        differences = (left.overlap - right.overlap)[first : first + length]
        means += [part.mean() for part in np.array_split(differences, max(1, round(length / BLOCK_POSITIONS)))]
        first += length
    found = gain_in_errors(left, right)
    if len(means) == 1:
        assert found == 0
    else:
        np.testing.assert_allclose(found, np.mean(means) / (np.std(means, ddof=1) / np.sqrt(len(means))))
    assert gain_in_errors(right, left) == -found
    assert gain_in_errors(left, left) == 0


def test_neighbours_that_agree_are_one_observation() -> None:
    """A hundred positions that all repeat ten are no more certain than the ten."""
    few = np.random.default_rng(0).normal(0.02, 0.1, 30)
    repeated = np.repeat(few, BLOCK_POSITIONS)
    nothing = np.zeros(len(repeated))
    in_errors = gain_in_errors(proposals(repeated, [len(repeated)]), proposals(nothing, [len(repeated)]))
    np.testing.assert_allclose(in_errors, few.mean() / (few.std(ddof=1) / np.sqrt(30)))


def proposals(overlap: NDArray[np.float64], lengths: Sequence[int]) -> Proposals:
    choices = np.zeros(len(overlap), np.int64)
    return Proposals(choices, choices, overlap, tuple(lengths))


def test_a_proposal_is_the_first_candidate_and_overlap_what_both_give_to_the_same_tokens() -> None:
    target = Candidates(np.array([[4, 9], [4, 9], [4, 9]]), np.array([[0.5, 0.2]] * 3))
    draft = Candidates(np.array([[4, 5], [9, 4], [7, 8]]), np.array([[0.6, 0.3]] * 3))
    found = propose(target, draft, (3,))
    assert found.choices.tolist() == [4, 4, 4]
    assert found.proposed.tolist() == [4, 9, 7]
    np.testing.assert_allclose(found.overlap, [0.5, 0.2 + 0.3, 0.0])
    assert str(found) == "33.3% (overlap 0.333)"

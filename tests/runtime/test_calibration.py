"""Acceptance, learnt from what the target drew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, node_depths
from draftline.runtime.calibration import Calibration

PROBS = np.array([0.0, 0.02, 0.1, 0.3, 0.5, 0.8, 0.97, 1.0])


def fan(probs: NDArray[np.float64], source: int = 0) -> DraftTrees:
    """One sequence: a root with as many children as there are probabilities, tokens 0, 1, ..."""
    num_nodes = probs.size + 1
    with np.errstate(divide="ignore"):
        log_probs = np.log(probs)
    return DraftTrees(
        parents=np.array([[-1] + [0] * probs.size], np.int32),
        token_ids=np.array([[99, *range(probs.size)]], np.int32),
        log_probs=np.array([[0.0, *log_probs]], np.float32),
        sources=np.array([[-1] + [source] * probs.size], np.int8),
        num_nodes=np.array([num_nodes]),
    )


def observe(calibration: Calibration, trees: DraftTrees, emitted_ids: list[list[int]]) -> None:
    calibration.observe(trees, node_depths(trees), np.array(emitted_ids, np.int32))


def estimate(calibration: Calibration, probs: NDArray[np.float64], source: int = 0) -> NDArray[np.float64]:
    trees = fan(probs, source)
    return calibration.acceptance(trees.log_probs, trees.sources)[0, 1:]


def test_trusts_the_draft_before_it_has_seen_anything() -> None:
    assert estimate(Calibration(2), PROBS, 1) == pytest.approx(PROBS, abs=1e-6)


def test_roots_are_certain_and_padding_impossible() -> None:
    log_probs, sources = np.array([[0.0, -np.inf]], np.float32), np.array([[-1, -1]], np.int8)
    assert Calibration(1).acceptance(log_probs, sources).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("quality", [0.0, 0.3, 1.0])
def test_learns_how_far_the_draft_can_be_trusted(quality: float) -> None:
    calibration, random = Calibration(2), np.random.default_rng(0)
    for _ in range(600):
        prob = random.random()
        observe(calibration, fan(np.array([prob]), 1), [[0 if random.random() < quality * prob else 5, -1]])
    assert estimate(calibration, PROBS[2:], 1) == pytest.approx(quality * PROBS[2:], abs=0.15)
    assert estimate(calibration, PROBS, 0) == pytest.approx(PROBS, abs=1e-6)  # the other source is another story


def test_forgets_what_has_changed() -> None:
    calibration, trees = Calibration(1), fan(np.array([0.7]))
    for _ in range(1000):
        observe(calibration, trees, [[5, -1]])
    assert estimate(calibration, np.array([0.7])) < 0.1
    for _ in range(40):
        observe(calibration, trees, [[0, 5]])
    assert estimate(calibration, np.array([0.7])) > 0.6


def test_siblings_of_the_drawn_token_are_failures_and_what_hangs_below_them_is_no_trial() -> None:
    #      root            emitted: 1, then 7 (not drafted)
    #     0    1
    #     |    |
    #     2    3
    trees = DraftTrees(
        parents=np.array([[-1, 0, 0, 1, 2]], np.int32),
        token_ids=np.array([[9, 0, 1, 2, 3]], np.int32),
        log_probs=np.log(np.array([[1.0, 0.55, 0.25, 0.95, 0.07]], np.float32)),
        sources=np.array([[-1, 0, 0, 0, 0]], np.int8),
        num_nodes=np.array([5]),
    )
    calibration = Calibration(1)
    for _ in range(1000):
        observe(calibration, trees, [[1, 7, -1]])
    learnt = calibration.acceptance(trees.log_probs, trees.sources)[0]
    # 0.55 always fails and 0.25 always succeeds: a function that never decreases says 1/2 of both.
    assert learnt[1:3] == pytest.approx([0.5, 0.5], abs=0.05)
    assert learnt[4] < 0.02  # tried behind the drawn token, and always wrong
    assert learnt[3] == pytest.approx(0.95, abs=0.02)  # never tried


def test_tokens_behind_the_end_of_the_tree_or_of_the_step_are_no_trials() -> None:
    probs = np.array([0.95])
    calibration, trees = Calibration(1), fan(probs)
    observe(calibration, trees, [[-1, -1, -1]])
    assert estimate(calibration, probs) == pytest.approx(0.95, abs=1e-6)
    observe(calibration, trees, [[0, 1, 2]])
    assert estimate(calibration, probs) == pytest.approx(0.975, abs=1e-6)  # one trial beside one of the prior


@given(st.lists(st.tuples(st.floats(0.001, 1), st.integers(0, 1), st.booleans()), max_size=60))
def test_never_decreases_in_the_draft_probability(trials: list[tuple[float, int, bool]]) -> None:
    calibration = Calibration(2)
    for prob, source, is_hit in trials:
        observe(calibration, fan(np.array([prob]), source), [[0 if is_hit else 5, -1]])
    grid = np.linspace(0, 1, 300)
    for source in (0, 1):
        estimates = estimate(calibration, grid, source)
        assert bool(np.all((estimates >= 0) & (estimates <= 1)))
        assert bool(np.all(np.diff(estimates) >= -1e-12))

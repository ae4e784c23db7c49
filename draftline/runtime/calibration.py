"""How often the target accepts what a drafter proposes, by the probability the drafter gave it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, flat_parents
from draftline.runtime.isotonic import fit_isotonic

# Draft probabilities at which acceptance is estimated; in between it is interpolated.
_KNOTS = np.array([0.0, 0.01, 0.03, 0.07, 0.15, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 1.0])
_PRIOR_TRIALS = 1.0  # at each knot, as if so many drafts had been accepted as often as their probability says
_MAX_TRIALS = 24.0  # at each knot and source; older ones are forgotten, but
_MIN_STEPS = 8.0  # those of so many steps like the last one are remembered, however many sequences there are


class Calibration:
    """Estimate P(a node is accepted | its parent is), a function of its source and its draft probability.

    A trial is a child of a node that was accepted: the one whose token the target drew there is a success, its siblings
    are failures. The estimate starts at the draft's own probability, follows the last ``_MAX_TRIALS`` trials around
    every knot, and never decreases in the draft probability: more evidence about neighbours settles what is noise.
    """

    def __init__(self, num_sources: int) -> None:
        assert num_sources > 0
        self._trials = np.zeros((num_sources, _KNOTS.size))
        self._successes = np.zeros((num_sources, _KNOTS.size))
        self._refit()

    def acceptance(self, log_probs: NDArray[np.float32], sources: NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the estimated acceptance of nodes given their parents, 0..1.

        Shapes: both of any one shape. 1 at roots and 0 in padding, which have source -1.
        """
        index, fraction = _places(log_probs)
        base = sources.astype(np.int64) * _KNOTS.size + index
        below, above = self._table[base], self._table[base + 1]
        estimate: NDArray[np.float64] = np.minimum(below + fraction * (above - below), 1.0)
        estimate[(sources < 0) & (log_probs == 0.0)] = 1.0
        return estimate

    def observe(self, trees: DraftTrees, depths: NDArray[np.int64], emitted_ids: NDArray[np.int32]) -> None:
        """Learn from a step.

        Shapes: ``depths [B, N]`` of the nodes, -1 in padding; ``emitted_ids [B, D + 1] int32``: the accepted draft
        tokens and the bonus token of every tree, padded with -1. The trees may hold nodes that the target never ran:
        the tokens say what would have become of them.
        """
        log_probs, sources, outcomes = _find_trials(trees, depths, emitted_ids)
        if not outcomes.size:
            return
        index, fraction = _places(log_probs)
        base = sources.astype(np.int64) * _KNOTS.size + index
        places, shares = np.concatenate([base, base + 1]), np.concatenate([1.0 - fraction, fraction])
        size, shape = self._trials.size, self._trials.shape
        trials = np.bincount(places, shares, minlength=size).reshape(shape)
        successes = np.bincount(places, shares * np.concatenate([outcomes, outcomes]), minlength=size).reshape(shape)
        most = np.maximum(_MAX_TRIALS, _MIN_STEPS * trials)
        remembered = np.minimum((most - trials) / np.maximum(self._trials, 1e-9), 1.0)
        self._trials = self._trials * remembered + trials
        self._successes = self._successes * remembered + successes
        self._refit()

    def _refit(self) -> None:
        weights = self._trials + _PRIOR_TRIALS
        rates = fit_isotonic((self._successes + _PRIOR_TRIALS * _KNOTS) / weights, weights)
        # One row of knots per source; the last row, which source -1 (padding) counts back to, says 0.
        self._table = np.concatenate([np.minimum(rates, 1.0).ravel(), np.zeros(_KNOTS.size)])


def _places(log_probs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the knot below each probability, and how far it lies on the way to the next one, 0..1."""
    places = np.interp(np.exp(log_probs), _KNOTS, _POSITIONS)
    index = np.minimum(places.astype(np.int64), _KNOTS.size - 2)
    return index, places - index


_POSITIONS = np.arange(_KNOTS.size, dtype=np.float64)


def _find_trials(
    trees: DraftTrees, depths: NDArray[np.int64], emitted_ids: NDArray[np.int32]
) -> tuple[NDArray[np.float32], NDArray[np.int8], NDArray[np.bool_]]:
    """Walk down every tree by the emitted tokens; children of the nodes on the way are the trials."""
    width, longest = depths.shape[1], emitted_ids.shape[1]
    node_rows = np.arange(depths.size) // width
    place = depths.ravel() - 1  # of the token emitted at a node's depth; -1 at roots, -2 in padding
    emitted = emitted_ids.ravel()[node_rows * longest + np.clip(place, 0, longest - 1)]
    is_decided = (emitted >= 0) & (place >= 0) & (place < longest)
    parents = flat_parents(trees.parents)
    is_hit = is_decided & (trees.token_ids.ravel() == emitted)
    is_hit |= place == -1
    for _ in range(int(place.max())):  # after i rounds, those down to depth i + 1 are right
        is_hit &= is_hit[parents]
    trials = np.flatnonzero(is_decided & is_hit[parents])
    return trees.log_probs.ravel()[trials], trees.sources.ravel()[trials], is_hit[trials]

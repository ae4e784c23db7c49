"""What drafters offer of late: how many candidates of which quality, at which depth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUM_BINS = 24
_BINS_PER_OCTAVE = 2
_RATE = 1 / 8  # weight of a step's trees against what was known, per step that has passed since
_MAX_WEIGHT = 1 / 3  # however many have: one step's trees are never the whole truth


class CandidateSupply:
    """Mean number of candidates per sequence, and of tokens they bring, by depth and by probability of acceptance.

    Unlike the nodes that were chosen, what is offered does not depend on the load, so it tells what a step with any
    other number of sequences could choose from.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        # [0]: candidates, [1]: expected accepted tokens; the first bin holds probabilities near 1.
        self._supply = np.zeros((2, max_depth, _NUM_BINS))
        self._num_observed = np.zeros(max_depth, np.int64)

    @property
    def is_known(self) -> bool:
        """Whether every depth was drafted at least once."""
        return bool(self._num_observed.all())

    def observe(
        self,
        acceptance: NDArray[np.float64],
        depths: NDArray[np.int64],
        num_sequences: int,
        drafted_depth: int,
        num_steps: int,
    ) -> None:
        """Learn from all candidates of a step, chosen or not.

        Shapes: ``acceptance``, ``depths [M]``: of the path that ends in a candidate, and its depth, 1, 2, ...
        ``num_steps`` have passed since the last call, this one included.
        """
        bins = (-_BINS_PER_OCTAVE * np.log2(np.maximum(acceptance, 1e-9))).astype(np.int64)
        places = (depths - 1) * _NUM_BINS + np.minimum(bins, _NUM_BINS - 1)
        size = self._max_depth * _NUM_BINS
        counts = np.bincount(places, minlength=size)[:size]
        tokens = np.bincount(places, acceptance, minlength=size)[:size]
        new = np.stack([counts, tokens]).reshape(self._supply.shape) / num_sequences
        weight = min(1.0 - (1.0 - _RATE) ** num_steps, _MAX_WEIGHT)
        # The first trees are told from what the draft believes of itself: they are soon overruled, 1, 2/3, 1/2, 2/5.
        weights = np.maximum(2.0 / (2.0 + self._num_observed), weight)
        weights[drafted_depth:] = 0.0
        self._supply += weights[:, None] * (new - self._supply)
        self._num_observed[:drafted_depth] += 1

    def totals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return draft nodes and expected accepted tokens per sequence of the best choices: two ``[D, bins]`` arrays.

        Entry ``[d - 1, i]``: drafting d deep and taking all candidates of the bins 0..i.
        """
        nodes, tokens = self._supply.cumsum(axis=1).cumsum(axis=2)
        return nodes, tokens

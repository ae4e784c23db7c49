"""How often a draft's proposals are what the target chooses: measured over the target's own answers, and judged.

Two drafts of the same positions are compared pairwise, by the overlap of each one's distribution with the target's, the
sum over tokens of min(p, q). That is the rate at which a token sampled from the draft would be kept (Leviathan et al.,
arXiv 2211.17192, section 3.3), and tells more of a position than whether the best token is the choice. Neighbours
depend on each other, so a difference is measured against the spread of the means of blocks of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIGMAS = 4.0  # one draft in 30,000 that is no better seems to be by more
CHANCE_SIGMAS = 3.0
BLOCK_POSITIONS = 16


@dataclass(frozen=True)
class Candidates:
    """The k most probable tokens of N positions: ``token_ids [N, k] int64``, the best first, and
    ``probabilities [N, k] float64``."""

    token_ids: NDArray[np.int64]
    probabilities: NDArray[np.float64]


@dataclass(frozen=True)
class Proposals:
    """Of N positions: ``choices [N] int64`` of the target, greedy, and what the draft ``proposed [N] int64`` there.

    ``overlap [N] float64``: of the two distributions, 0..1. ``lengths``: of the answers that the positions are of.
    """

    choices: NDArray[np.int64]
    proposed: NDArray[np.int64]
    overlap: NDArray[np.float64]
    lengths: tuple[int, ...]

    @property
    def is_accepted(self) -> NDArray[np.bool_]:
        is_accepted: NDArray[np.bool_] = self.choices == self.proposed
        return is_accepted

    @property
    def acceptance_rate(self) -> float:
        return float(self.is_accepted.mean())

    def __str__(self) -> str:
        return f"{self.acceptance_rate:.1%} (overlap {self.overlap.mean():.3f})"

    @property
    def chance(self) -> float:
        """The rate that is expected if the same proposals stood at random positions.

        >>> Proposals(np.array([1, 1, 1, 2]), np.array([1, 2, 2, 2]), np.zeros(4), (4,)).chance
        0.375
        """
        tokens = np.union1d(self.choices, self.proposed)
        shares = [
            np.bincount(np.searchsorted(tokens, ids), minlength=len(tokens)) for ids in (self.choices, self.proposed)
        ]
        return float(shares[0] @ shares[1]) / len(self.choices) ** 2

    def is_near_chance(self) -> bool:
        """Whether so many are accepted at random too, or nearly.

        >>> even, nothing = np.arange(100) % 10, np.zeros(100)
        >>> Proposals(even, even, nothing, (100,)).is_near_chance()
        False
        >>> Proposals(even, (even + np.arange(100) // 10) % 10, nothing, (100,)).is_near_chance()
        True
        """
        count, chance = len(self.choices), self.chance
        excess = self.is_accepted.sum() - count * chance
        return bool(excess <= CHANCE_SIGMAS * math.sqrt(max(count * chance * (1 - chance), 1.0)))


def propose(target: Candidates, draft: Candidates, lengths: tuple[int, ...]) -> Proposals:
    """Take the first of the draft's candidates as the proposal, and the first of the target's as the choice.

    >>> target = Candidates(np.array([[7, 9]]), np.array([[0.5, 0.25]]))
    >>> propose(target, Candidates(np.array([[9, 4]]), np.array([[0.75, 0.25]])), (1,)).overlap.tolist()
    [0.25]
    """
    is_same = draft.token_ids[:, :, None] == target.token_ids[:, None, :]
    of_target = (is_same * target.probabilities[:, None, :]).sum(-1)
    overlap = np.minimum(of_target, draft.probabilities).sum(-1)
    return Proposals(target.token_ids[:, 0], draft.token_ids[:, 0], overlap, lengths)


def gain_in_errors(left: Proposals, right: Proposals) -> float:
    """Return how much better ``left`` is, in standard errors of the mean difference; both are of the same positions.

    >>> choices, shares = np.zeros(64, np.int64), np.linspace(0, 0.1, 64)
    >>> sure, torn = (Proposals(choices, choices, share, (64,)) for share in (0.6 - shares, 0.5 + shares))
    >>> gain_in_errors(sure, torn) > 0 > gain_in_errors(torn, sure), gain_in_errors(sure, sure)
    (False, 0.0)
    """
    means = []
    first = 0
    for length in left.lengths:
        differences = left.overlap[first : first + length] - right.overlap[first : first + length]
        means += [block.mean() for block in np.array_split(differences, max(1, round(length / BLOCK_POSITIONS)))]
        first += length
    if len(means) < 2 or np.ptp(means) < 1e-9:
        return 0.0
    return float(np.mean(means) / (np.std(means, ddof=1) / math.sqrt(len(means))))

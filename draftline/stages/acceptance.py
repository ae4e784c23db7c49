"""How often a draft's best token is the target's own choice: measured over fixed texts, and judged.

Two drafts of the same positions are compared pairwise, by the probability that each gives to the target's choice: that
says more of a position than whether the choice is the best token. A difference counts where its mean is more than
``SIGMAS`` times its standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIGMAS = 3.0


@dataclass(frozen=True)
class Proposals:
    """Of N positions: ``choices [N] int64`` of the target, greedy, and what the draft ``proposed [N] int64`` there.

    ``confidence [N] float64``: the probability that the draft gives to the choice, 0 where that is no candidate.
    """

    choices: NDArray[np.int64]
    proposed: NDArray[np.int64]
    confidence: NDArray[np.float64]

    @property
    def is_accepted(self) -> NDArray[np.bool_]:
        is_accepted: NDArray[np.bool_] = self.choices == self.proposed
        return is_accepted

    @property
    def acceptance_rate(self) -> float:
        return float(self.is_accepted.mean())

    def __str__(self) -> str:
        return f"{self.acceptance_rate:.1%} (probability {self.confidence.mean():.3f})"

    @property
    def chance(self) -> float:
        """The rate that is expected if the same proposals stood at random positions.

        >>> Proposals(np.array([1, 1, 1, 2]), np.array([1, 2, 2, 2]), np.zeros(4)).chance
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
        >>> Proposals(even, even, nothing).is_near_chance()
        False
        >>> Proposals(even, (even + np.arange(100) // 10) % 10, nothing).is_near_chance()
        True
        """
        count, chance = len(self.choices), self.chance
        excess = self.is_accepted.sum() - count * chance
        return bool(excess <= SIGMAS * math.sqrt(max(count * chance * (1 - chance), 1.0)))


def propose(choices: NDArray[np.int64], candidates: NDArray[np.int32], log_probs: NDArray[np.float32]) -> Proposals:
    """Take the first of ``candidates [N, k]`` as the proposal; ``log_probs [N, k]`` are theirs.

    >>> propose(np.array([7, 8]), np.array([[7, 9], [9, 8]]), np.log([[0.5, 0.25], [0.5, 0.25]])).confidence.tolist()
    [0.5, 0.25]
    """
    is_choice = candidates == choices[:, None]
    confidence = np.where(is_choice, np.exp(log_probs.astype(np.float64)), 0.0).sum(axis=1)
    return Proposals(choices, candidates[:, 0].astype(np.int64), confidence)


def is_better(left: Proposals, right: Proposals) -> bool:
    """Whether ``left`` is the better draft by more than chance; both are of the same positions.

    >>> choices = np.zeros(40, np.int64)
    >>> sure, torn = (Proposals(choices, choices, np.full(40, share)) for share in (0.6, 0.5))
    >>> is_better(sure, torn), is_better(torn, sure), is_better(sure, sure)
    (True, False, False)
    """
    differences = left.confidence - right.confidence
    mean, error = float(differences.mean()), float(differences.std()) / math.sqrt(len(differences))
    return mean > max(SIGMAS * error, 1e-9)

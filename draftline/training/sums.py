"""Losses and counts of batches, added up over batches and processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftline.training.heads.head import HeadLoss

MAX_DEPTHS = 64
COUNTS = ("num_correct", "num_accepted", "num_counted")


def _no_counts() -> NDArray[np.float64]:
    return np.zeros(MAX_DEPTHS)


@dataclass
class Sums:
    """Counts ``[MAX_DEPTHS]`` are by depth, the first draft token first, 0 beyond what there is; see ``HeadLoss``."""

    loss: float = 0.0
    num_positions: float = 0.0
    num_correct: NDArray[np.float64] = field(default_factory=_no_counts)
    num_accepted: NDArray[np.float64] = field(default_factory=_no_counts)
    num_counted: NDArray[np.float64] = field(default_factory=_no_counts)

    def add(self, losses: HeadLoss) -> None:
        self.loss += float(losses.loss.detach())
        self.num_positions += float(losses.num_positions)
        for name in COUNTS:
            counts = getattr(losses, name).detach().cpu().numpy()
            getattr(self, name)[: len(counts)] += counts

    def pack(self) -> list[float]:
        """Return all as one list of numbers, which can be added to others."""
        return [self.loss, self.num_positions, *np.concatenate([getattr(self, name) for name in COUNTS]).tolist()]

    @classmethod
    def unpack(cls, numbers: Sequence[float]) -> Sums:
        """Return what ``pack`` packed."""
        counts = np.array(numbers[2:], np.float64).reshape(len(COUNTS), MAX_DEPTHS)
        return cls(numbers[0], numbers[1], *counts)

    @property
    def mean_loss(self) -> float:
        return self.loss / max(self.num_positions, 1.0)

    @property
    def accuracy(self) -> list[float]:
        """At each depth, the share of positions with the target's choice, whatever was drafted before it."""
        return self._shares(self.num_correct)

    @property
    def acceptance(self) -> list[float]:
        """At each depth, the share of positions where that and all before it are: an ``acceptance_rate_at``."""
        return self._shares(self.num_accepted)

    def _shares(self, counts: NDArray[np.float64]) -> list[float]:
        depths = self.num_counted > 0
        return [round(float(share), 6) for share in counts[depths] / self.num_counted[depths]]

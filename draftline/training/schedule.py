"""The learning rate as a function of how much of the training is used up."""

from __future__ import annotations

import math


def learning_rate_at(progress: float, highest: float, warmup_share: float) -> float:
    """Return the rate at ``progress`` (0..1): linear from 0 during ``warmup_share``, then a half cosine down to 0.

    >>> [round(learning_rate_at(progress / 4, 8.0, 0.5), 3) for progress in range(5)]
    [0.0, 4.0, 8.0, 4.0, 0.0]
    """
    progress = min(progress, 1.0)
    if progress < warmup_share:
        return highest * progress / warmup_share
    share_left = 1.0 if warmup_share == 1 else (1 - progress) / (1 - warmup_share)
    return highest * 0.5 * (1 - math.cos(math.pi * share_left))


def progress_of(tokens: int, total_tokens: int, seconds: float, budget_seconds: float | None) -> float:
    """Return how much of the training is used up, 0..1: of its tokens or its time, whichever is more."""
    share = tokens / total_tokens
    return min(1.0, share if budget_seconds is None else max(share, seconds / budget_seconds))

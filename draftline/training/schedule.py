"""The learning rate and the depth of training-time test, by how much of the training is used up."""

from __future__ import annotations

import math


def rate_share_at(progress: float, warmup_share: float) -> float:
    """Return the share of the highest rate at ``progress`` (0..1).

    It rises linearly from 0 during ``warmup_share``, then falls as a half cosine to 0.

    >>> [round(rate_share_at(progress / 4, 0.5), 3) for progress in range(5)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    progress = min(progress, 1.0)
    if progress < warmup_share:
        return progress / warmup_share
    share_left = 1.0 if warmup_share == 1 else (1 - progress) / (1 - warmup_share)
    return 0.5 * (1 - math.cos(math.pi * share_left))


def ttt_steps_at(progress: float, ttt_steps: int, growth: float) -> int:
    """Return how many steps are unrolled at ``progress`` (0..1): they grow evenly from 1 during the share ``growth``.

    >>> [ttt_steps_at(progress / 10, 5, 0.5) for progress in range(8)]
    [1, 2, 3, 4, 5, 5, 5, 5]
    """
    return ttt_steps if progress >= growth else min(1 + int(ttt_steps * progress / growth), ttt_steps)


def progress_of(tokens: int, total_tokens: int, seconds: float, budget_seconds: float | None) -> float:
    """Return how much of the training is used up, 0..1: of its tokens or its time, whichever is more."""
    share = tokens / total_tokens
    return min(1.0, share if budget_seconds is None else max(share, seconds / budget_seconds))

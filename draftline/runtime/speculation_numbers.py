"""What speculation did, for one request or in total."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SpeculationNumbers:
    """Counts of decode steps, those that verified no draft token included.

    - ``num_steps``: draft + verify cycles, each of which adds one bonus token.
    - ``num_drafted_tokens``: proposed by the drafters; ``num_verified_tokens``: those of them in the tree that the
      target ran (``auto`` trees leave out what would not pay); ``num_accepted_tokens``.
    - ``num_emitted_tokens``: accepted and bonus tokens that became part of the answer: an answer may end inside a run.
    - ``num_draft_forwards``, ``num_target_forwards``: forwards that the request took part in, prefill included.
    - ``histogram[a]``: steps that accepted exactly ``a`` draft tokens.
    """

    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_draft_forwards: int = 0
    num_target_forwards: int = 0
    histogram: tuple[int, ...] = ()

    @property
    def num_bonus_tokens(self) -> int:
        return self.num_steps

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens and the bonus token, mean over steps; 0 before the first."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0..1; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_drafted_tokens if self.num_drafted_tokens else 0.0

    @property
    def acceptance_rate_at(self) -> tuple[float, ...]:
        """Entry ``d - 1`` is the share of steps whose draft token of depth d was accepted."""
        return tuple(sum(self.histogram[depth:]) / self.num_steps for depth in range(1, len(self.histogram)))


NO_SPECULATION = SpeculationNumbers()

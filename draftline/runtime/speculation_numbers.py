"""What speculation did, for one request or in total."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class SpeculationCounters:
    """Counts that grow; ``numbers`` freezes them. One per sequence, and one in total."""

    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_verified_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_draft_forwards: int = 0
    num_target_forwards: int = 0
    histogram: list[int] = field(default_factory=list)

    def add_step(self, num_drafted: int, num_verified: int, num_accepted: int) -> None:
        """Count one decode step: draft tokens proposed, those that the target ran, those accepted."""
        assert 0 <= num_accepted <= num_verified <= num_drafted
        self.num_steps += 1
        self.num_drafted_tokens += num_drafted
        self.num_verified_tokens += num_verified
        self.num_accepted_tokens += num_accepted
        if num_accepted >= len(self.histogram):
            self.histogram.extend([0] * (num_accepted + 1 - len(self.histogram)))
        self.histogram[num_accepted] += 1

    def add_emitted(self, num_tokens: int) -> None:
        self.num_emitted_tokens += num_tokens

    def add_draft_forward(self, count: int = 1) -> None:
        self.num_draft_forwards += count

    def add_target_forward(self, count: int = 1) -> None:
        self.num_target_forwards += count

    def numbers(self) -> SpeculationNumbers:
        return SpeculationNumbers(
            num_steps=self.num_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_verified_tokens=self.num_verified_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_emitted_tokens=self.num_emitted_tokens,
            num_draft_forwards=self.num_draft_forwards,
            num_target_forwards=self.num_target_forwards,
            histogram=tuple(self.histogram),
        )


def sum_numbers(parts: Iterable[SpeculationNumbers]) -> SpeculationNumbers:
    """Add the numbers of several requests. Forwards are counted once per request that took part in them.

    >>> one = SpeculationNumbers(num_steps=2, num_accepted_tokens=1, histogram=(1, 1))
    >>> two = SpeculationNumbers(num_steps=1, num_accepted_tokens=2, histogram=(0, 0, 1))
    >>> sum_numbers([one, two]).histogram
    (1, 1, 1)
    """
    sums = SpeculationCounters()
    for part in parts:
        sums.num_steps += part.num_steps
        sums.num_drafted_tokens += part.num_drafted_tokens
        sums.num_verified_tokens += part.num_verified_tokens
        sums.num_accepted_tokens += part.num_accepted_tokens
        sums.num_emitted_tokens += part.num_emitted_tokens
        sums.num_draft_forwards += part.num_draft_forwards
        sums.num_target_forwards += part.num_target_forwards
        sums.histogram.extend([0] * (len(part.histogram) - len(sums.histogram)))
        for num_accepted, count in enumerate(part.histogram):
            sums.histogram[num_accepted] += count
    return sums.numbers()

"""When the tokens of answers came, and the speeds that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftline.errors import DraftlineError


@dataclass
class Timeline:
    """One answer: ``events`` says at which second of ``time.perf_counter`` how many tokens were there, in order."""

    started: float
    events: list[tuple[float, int]] = field(default_factory=list)

    def count_at(self, instant: float) -> int:
        """Return how many tokens there were at ``instant``, events at that instant included."""
        return max((count for time, count in self.events if time <= instant), default=0)


def decode_tokens_per_second(timelines: Sequence[Timeline]) -> float:
    """Return the decode speed of answers that ran together, prefill excluded.

    The window opens when every answer has its first token and closes when the first answer has its last one, so that
    all of it is decoding at the full batch size. Tokens are summed over the batch.

    Raises: DraftlineError where the window holds no token: the answers did not run together.

    >>> decode_tokens_per_second([Timeline(0.0, [(1.0, 1), (2.0, 2), (3.0, 3)]), Timeline(0.0, [(2.0, 1), (4.0, 3)])])
    1.0
    """
    opens = max(timeline.events[0][0] for timeline in timelines)
    closes = min(timeline.events[-1][0] for timeline in timelines)
    num_tokens = sum(timeline.count_at(closes) - timeline.count_at(opens) for timeline in timelines)
    if num_tokens <= 0 or closes <= opens:
        got = f"first tokens until {opens:.3f} s, a last token at {closes:.3f} s"
        raise DraftlineError("bench", "all answers of a batch decode at the same time", got, "measure more tokens")
    return num_tokens / (closes - opens)


def first_token_ms(timelines: Sequence[Timeline]) -> float:
    """Return how long the slowest of the answers took to its first token, in ms.

    >>> first_token_ms([Timeline(0.5, [(0.75, 1), (9.0, 8)])])
    250.0
    """
    return max(timeline.events[0][0] - timeline.started for timeline in timelines) * 1000

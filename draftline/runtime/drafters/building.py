"""The drafters of an engine, and what they ask of the block pool."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.runtime.drafters.drafter import Drafter
from draftline.runtime.drafters.graph import GraphDrafter
from draftline.runtime.drafters.medusa import MedusaDrafter
from draftline.runtime.drafters.ngram import NgramDrafter
from draftline.runtime.limits import EngineLimits
from draftline.runtime.step_builder import StepBuilder
from draftline.sessions.protocol import DraftSession
from draftline.speculation import EXACT, Acceptance, TreeShape

_HEADS = frozenset({"eagle1", "eagle2", "eagle3"})
_NO_LIMIT = 2**31


@dataclass(frozen=True)
class DrafterSetup:
    """One drafter: ``method`` as in the pipeline; ``session`` where it has a graph of its own.

    ``max_positions`` 0 = no limit.
    """

    method: str
    session: DraftSession | None = None
    max_positions: int = 0


@dataclass(frozen=True)
class Speculation:
    """How an engine speculates; no sources = plain decoding."""

    sources: tuple[DrafterSetup, ...]
    shape: TreeShape
    acceptance: Acceptance = EXACT

    @property
    def lookahead(self) -> int:
        """Tokens behind a block that its rows in the drafters' pools depend on: a head's row carries the next token."""
        return int(any(source.method in _HEADS for source in self.sources))

    @property
    def keeps_kv(self) -> bool:
        return any(source.session is not None for source in self.sources)


PLAIN = Speculation((), TreeShape("chain", max_nodes=2, max_depth=1, top_k=1))


def build_drafters(speculation: Speculation, builder: StepBuilder, limits: EngineLimits) -> list[Drafter]:
    """Build a drafter per source; a node's ``source`` is the index here."""
    num_seats = limits.max_batch_size
    drafters: list[Drafter] = []
    for index, source in enumerate(speculation.sources):
        if source.method == "ngram":
            drafters.append(NgramDrafter(num_seats=num_seats, max_depth=speculation.shape.max_depth, source=index))
        elif source.method == "medusa":
            drafters.append(MedusaDrafter(num_seats=num_seats, shape=speculation.shape, source=index))
        else:
            assert source.session is not None, f"a drafter of method {source.method} has a session"
            drafters.append(
                GraphDrafter(
                    source.session,
                    builder,
                    num_seats=num_seats,
                    shape=speculation.shape,
                    is_head=source.method in _HEADS,
                    max_positions=source.max_positions or _NO_LIMIT,
                    max_waiting=limits.max_num_tokens,
                    source=index,
                )
            )
    return drafters

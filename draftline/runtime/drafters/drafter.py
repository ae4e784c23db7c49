"""What the runtime asks of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import CommittedRows
from draftline.sessions.protocol import StepResult


@dataclass(frozen=True)
class Roots:
    """The decoding sequences of a step, before its forward.

    Shapes: ``seats``, ``contexts`` (committed tokens), ``max_depths [D] int64``; ``token_ids [D] int32``, of the roots.
    A ``max_depths`` of 0 asks for no draft. ``max_nodes [D] int64`` and ``chain_only [D] bool`` bound what is proposed,
    as in ``keep_best``.
    """

    sequences: list[Sequence]
    seats: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    contexts: NDArray[np.int64]
    max_depths: NDArray[np.int64]
    max_nodes: NDArray[np.int64]
    chain_only: NDArray[np.bool_]


@dataclass(frozen=True)
class VerifiedStep:
    """What a step committed, also of answers that ended in it, which still have their seats.

    Sequences that it ended for their logits are left out: nothing of them was committed.
    """

    sequences: list[Sequence]
    seats: NDArray[np.int64]
    rows: CommittedRows
    result: StepResult


class Drafter(Protocol):
    """Keeps what it needs by seat; a sequence that returns after a preemption takes another seat and begins anew.

    ``is_free``: whether a draft costs no forward, so that it is made whatever the policy plans. ``num_forwards``: of a
    graph of its own so far.
    """

    is_free: bool
    num_forwards: int

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that was given a seat; its first ``num_committed`` tokens came from the prefix cache."""
        ...

    def leave(self, seat: int) -> None:
        """Forget the sequence in this seat: it ended, or lost its blocks."""
        ...

    def propose(self, roots: Roots) -> DraftTrees:
        """Draft a tree within the bounds for every root; the root alone where it cannot."""
        ...

    def observe(self, step: VerifiedStep) -> None:
        """Take in what a step committed."""
        ...

    def num_filled(self, sequence: Sequence) -> int:
        """Count the committed tokens of which this drafter holds all that a sequence sharing their blocks needs."""
        ...

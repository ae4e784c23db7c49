"""Drafts from Medusa heads, which the target's graph runs on every sampled row: head h proposes depth h + 1.

Source: Cai et al., "Medusa", 2024, section 2.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees
from draftline.runtime.drafters.drafter import Roots, VerifiedStep
from draftline.runtime.sequence import Sequence
from draftline.speculation import TreeShape
from draftline.tree_growth import grow_by_depth


class MedusaDrafter:
    """Keeps the candidates of the row that drew each sequence's newest token."""

    is_free = True
    num_forwards = 0

    def __init__(self, *, num_seats: int, shape: TreeShape, source: int) -> None:
        self._shape, self._source = shape, source
        self._ids: NDArray[np.int32] = np.empty((num_seats, 0, 0), dtype=np.int32)
        self._log_probs: NDArray[np.float32] = np.empty((num_seats, 0, 0), dtype=np.float32)
        self._has_candidates = np.zeros(num_seats, dtype=np.bool_)

    def join(self, sequence: Sequence) -> None:
        self._has_candidates[sequence.seat] = False

    def leave(self, seat: int) -> None:
        """What is kept is replaced by who takes the seat next."""

    def num_filled(self, sequence: Sequence) -> int:
        return sequence.num_committed

    def propose(self, roots: Roots) -> DraftTrees:
        max_depths = np.where(self._has_candidates[roots.seats], roots.max_depths, 0)
        growth = grow_by_depth(
            self._shape, roots.token_ids, max_depths, self._ids[roots.seats], self._log_probs[roots.seats], self._source
        )
        return growth.finish(roots.max_nodes, roots.chain_only)

    def observe(self, step: VerifiedStep) -> None:
        ids, log_probs = step.result.head_ids, step.result.head_log_probs
        assert ids is not None, "an engine with Medusa heads returns their candidates"
        assert log_probs is not None
        if self._ids.shape[1:] != ids.shape[1:]:
            num_seats = len(self._has_candidates)
            self._ids = np.zeros((num_seats, *ids.shape[1:]), dtype=np.int32)
            self._log_probs = np.zeros((num_seats, *ids.shape[1:]), dtype=np.float32)
        is_drawn = step.rows.sample_rows >= 0
        seats, rows = step.seats[is_drawn], step.rows.sample_rows[is_drawn]
        self._ids[seats], self._log_probs[seats] = ids[rows], log_probs[rows]
        self._has_candidates[seats] = True

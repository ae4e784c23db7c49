"""Drafts from the request's own text: what followed the last occurrence of its newest tokens.

Source: prompt lookup decoding (Saxena, 2023). Needs no checkpoint and no session.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, chain_trees
from draftline.runtime.drafters.drafter import Roots, VerifiedStep
from draftline.runtime.sequence import Sequence

_LENGTHS = range(2, 5)  # tokens of a suffix that is looked up
_LOG_PROBABILITIES = {2: math.log(0.4), 3: math.log(0.6), 4: math.log(0.75)}  # a start for the calibration


class NgramDrafter:
    """Proposes a chain: the tokens behind the latest earlier occurrence of the longest suffix that has one.

    The index of a sequence grows with its text, so a step costs the same at any length.
    """

    is_free = True
    num_forwards = 0

    def __init__(self, *, num_seats: int, max_depth: int, source: int) -> None:
        self._max_depth, self._source = max_depth, source
        self._indices = [_Index() for _ in range(num_seats)]

    def join(self, sequence: Sequence) -> None:
        self._indices[sequence.seat] = _Index()

    def leave(self, seat: int) -> None:
        """What is kept is replaced by who takes the seat next."""

    def num_filled(self, sequence: Sequence) -> int:
        return sequence.num_committed

    def propose(self, roots: Roots) -> DraftTrees:
        num_roots = len(roots.sequences)
        token_ids = np.full((num_roots, self._max_depth), -1, dtype=np.int32)
        log_probs = np.full((num_roots, self._max_depth), -np.inf, dtype=np.float32)
        lengths = np.zeros(num_roots, dtype=np.int64)
        limits = np.minimum(roots.max_depths, roots.max_nodes - 1).tolist()
        for row, (sequence, limit) in enumerate(zip(roots.sequences, limits, strict=True)):
            depth = min(limit, self._max_depth)
            if depth == 0:
                continue
            text = sequence.token_ids[: sequence.num_tokens]
            start, matched = self._indices[sequence.seat].find(text)
            if matched == 0:
                continue
            # Where the text ends before the draft does, it goes on with the draft: the text repeats itself.
            lengths[row] = depth
            token_ids[row, :depth] = np.resize(text[start : start + depth], depth)
            log_probs[row, :depth] = _LOG_PROBABILITIES[matched]
        return chain_trees(roots.token_ids, token_ids, log_probs, lengths, self._source)

    def observe(self, step: VerifiedStep) -> None:
        """The text is read when it is needed."""


class _Index:
    """Where each n-gram of a text was last followed by something: the place of what follows."""

    __slots__ = ("_next_of", "_num_indexed")

    def __init__(self) -> None:
        self._next_of: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # n-grams that end before this token are known

    def find(self, text: NDArray[np.int32]) -> tuple[int, int]:
        """Return the place behind the latest earlier occurrence of the longest suffix, and its length (0 = none)."""
        self._extend(text)
        newest = tuple(text[-_LENGTHS[-1] :].tolist())
        for length in reversed(_LENGTHS):
            if length <= len(newest) and (place := self._next_of.get(newest[-length:])) is not None:
                return place, length
        return 0, 0

    def _extend(self, text: NDArray[np.int32]) -> None:
        first = max(self._num_indexed - _LENGTHS[-1], 0)
        tokens = text[first:].tolist()
        for place in range(max(self._num_indexed, 1) - first, len(tokens)):
            for length in _LENGTHS:
                if length <= place:
                    self._next_of[tuple(tokens[place - length : place])] = first + place
        self._num_indexed = text.size

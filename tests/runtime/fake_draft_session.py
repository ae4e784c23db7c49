"""A drafter that knows the fake target's next token, as far as what the runtime gave it is right.

It reads its context back from its own pool, as the target does: a row that was never filled, filled with another token
or feature, or is attended by the wrong node makes it guess wrong, and a test sees the acceptance fall. A feature is
the token it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.protocol import DraftBatch, DraftResult
from tests.runtime.fake_session import FakeSession, in_step_masks, next_token


@dataclass
class Row:
    """``feature``: the token at ``position`` (heads), or -1; ``token``: the row's own input."""

    feature: int
    token: int
    position: int


class FakeDraftSession:
    """``is_head``: rows are (feature at p, token p + 1) at position p; else token p at position p.

    ``accuracy``: share of contexts, by their hash, in which the first candidate is the target's token.
    """

    def __init__(
        self,
        target: FakeSession,
        *,
        num_blocks: int,
        block_size: int,
        num_candidates: int,
        is_head: bool,
        accuracy: float = 1.0,
        max_positions: int = 10**6,
    ) -> None:
        self._target, self._is_head, self._accuracy = target, is_head, accuracy
        self._num_candidates, self._max_positions = num_candidates, max_positions
        self._block_size = block_size
        self._pool = np.full((num_blocks * block_size, 3), -1, dtype=np.int64)
        self._rows: list[Row] = []
        self._features: dict[int, tuple[int, int]] = {}  # place -> token and position of the target's row
        self.num_forwards = 0
        self.failures: dict[int, Exception] = {}  # by number of the forward, from 1 on

    def forward(self, batch: DraftBatch) -> DraftResult:
        self.num_forwards += 1
        if self.num_forwards in self.failures:
            raise self.failures[self.num_forwards]
        if batch.is_first:
            self._rows = []
        first_id = len(self._rows)
        for token, position, feature_row in zip(
            batch.input_ids.tolist(), batch.position_ids.tolist(), batch.feature_rows.tolist(), strict=True
        ):
            assert 0 <= position < self._max_positions
            self._rows.append(Row(self._feature(feature_row, position, first_id), token, position))
        new_ids = list(range(first_id, len(self._rows)))
        owner = {row_id: index for index, row_id in enumerate(batch.row_ids.tolist())}
        assert len(owner) == batch.row_ids.size
        assert set(new_ids) <= set(owner)
        masks, committed = in_step_masks(batch), dict[int, list[list[int]]]()
        owners = np.searchsorted(batch.sequence_starts, np.arange(batch.row_ids.size), side="right") - 1
        token_ids, sampled = [], []
        for index, candidate in enumerate(batch.candidate_rows.tolist()):
            place = owner[new_ids[candidate]]
            sequence = int(owners[place])
            if sequence not in committed:
                committed[sequence] = self._committed(batch, sequence)
            first, last = batch.sequence_starts[sequence : sequence + 2].tolist()
            seen = batch.row_ids[first:last][masks[sequence][place - first]].tolist()
            context = self._context(committed[sequence], seen)
            temperature, number = float(batch.temperature[index]), float(batch.uniform[index])
            guess = next_token(context, temperature, number, self._target.vocab_size)
            if next_token(context, 0.0, 0.0, 1000) >= 1000 * self._accuracy:
                guess = (guess + 1) % self._target.vocab_size
            sampled.append(guess)
            token_ids.append([(guess + offset) % self._target.vocab_size for offset in range(self._num_candidates)])
        shape = (len(token_ids), self._num_candidates)
        probabilities = np.tile(0.5 ** np.arange(1, self._num_candidates + 1), (len(token_ids), 1))
        return DraftResult(
            np.array(token_ids, dtype=np.int32).reshape(shape),
            np.log(probabilities).astype(np.float32),
            None if self._is_head else np.array(sampled, dtype=np.int32),
        )

    def keep_features(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        assert self._is_head
        last = self._target.last
        assert last is not None
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            self._features[place] = int(last.input_ids[row]), int(last.position_ids[row])

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert row_ids.shape == slots.shape
        assert len(set(slots.tolist())) == slots.size
        for row_id, slot in zip(row_ids.tolist(), slots.tolist(), strict=True):
            row = self._rows[row_id]
            assert slot % self._block_size == row.position % self._block_size
            self._pool[slot] = row.feature, row.token, row.position

    def close(self) -> None:
        pass

    def _feature(self, feature_row: int, position: int, first_id: int) -> int:
        if not self._is_head:
            return -1
        if feature_row < 0:
            parent = self._rows[-1 - feature_row]
            assert -1 - feature_row < first_id, "a row is fed what an earlier forward put out"
            assert parent.position == position - 1 or position == self._max_positions - 1
            return parent.token
        token, feature_position = self._features[feature_row]
        assert feature_position == position
        return token

    def _committed(self, batch: DraftBatch, sequence: int) -> list[list[int]]:
        """Read the rows of a context back from the pool."""
        positions = np.arange(int(batch.context_lengths[sequence]))
        blocks = batch.block_table[sequence, positions // self._block_size].astype(np.int64)
        rows: list[list[int]] = self._pool[blocks * self._block_size + positions % self._block_size].tolist()
        return rows

    def _context(self, committed: list[list[int]], seen: list[int]) -> NDArray[np.int32]:
        """Return the text that an in-step row stands for, as its pool and the rows it sees tell it."""
        rows = [(feature, token, position) for feature, token, position in committed]
        rows += [(row.feature, row.token, row.position) for row in map(self._rows.__getitem__, seen)]
        features, tokens, positions = map(list, zip(*rows, strict=True))
        if positions != list(range(len(rows))):
            return np.full(1, -1, dtype=np.int32)  # the pool is wrong: any guess
        if self._is_head:
            tokens = [features[0], *tokens]
            if features != tokens[:-1]:
                return np.full(1, -1, dtype=np.int32)
        return np.array(tokens, dtype=np.int32)

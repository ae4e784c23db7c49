"""Keep the features of the rows an engine commits while it answers: training data at no second forward."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.protocol import Session, StepBatch, StepResult


class FeatureSession(Session, Protocol):
    """A session whose forwards put out ``features [T, F] float32``: of an engine with ``captured_layers``."""

    @property
    def features(self) -> NDArray[np.float32]: ...


class CapturingSession:
    """Implements ``Session`` around another one, and remembers the tokens and features of running sequences.

    It sees steps, never requests. A sequence is known by the first block of its row in the block table, which nobody
    else holds while it runs, because the engine has no prefix cache. A row at position 0 begins a sequence anew: a
    prompt in several chunks goes on in its place, and a preempted one, which is computed again, is not kept twice.
    Whoever submits requests asks for the rows of one that ended by its tokens (``features_of``), in ``on_output``: the
    engine's thread calls that before the next step.

    What ended, was preempted or was lost with a failed forward stays where it is until it is overwritten: all that run
    commit a row in every step, so where ``max_batch_size`` places are full and a sequence begins, the place that was
    written longest ago is nobody's.

    Features are rounded to float16 as they come; one beyond its range becomes an infinity, which the store refuses.
    """

    def __init__(self, session: FeatureSession, *, max_batch_size: int, max_seq_len: int, feature_size: int) -> None:
        self._session = session
        self.key_chunk, self.num_blocks = session.key_chunk, session.num_blocks
        # Memory of a place is taken from the system as its rows are first written.
        self._token_ids = np.empty((max_batch_size, max_seq_len), np.int32)
        self._features = np.empty((max_batch_size, max_seq_len, feature_size), np.float16)
        self._num_rows = np.zeros(max_batch_size, np.int64)
        self._last_write = np.full(max_batch_size, -1, np.int64)  # when the place was written
        self._num_writes = 0
        self._place_of: dict[int, int] = {}  # by first block
        self._batch: StepBatch | None = None

    def forward(self, batch: StepBatch) -> StepResult:
        self._batch = None
        result = self._session.forward(batch)
        self._batch = batch
        return result

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        self._session.commit(rows, slots)
        batch = self._batch
        assert batch is not None, "rows are those of a forward"
        if not len(rows):
            return
        owners = np.searchsorted(batch.sequence_starts, rows, side="right") - 1
        in_step, first, of_rows, counts = np.unique(owners, return_index=True, return_inverse=True, return_counts=True)
        contexts = batch.context_lengths[in_step]
        blocks = batch.block_table[in_step, 0].tolist()
        places = np.array(
            [self._place(block, context) for block, context in zip(blocks, contexts.tolist(), strict=True)], np.int64
        )
        assert np.array_equal(self._num_rows[places], contexts), "each row once: the prefix cache is off"
        positions = batch.position_ids[rows]
        assert np.array_equal(positions, contexts[of_rows] + np.arange(len(rows)) - first[of_rows]), "rows are a path"
        self._token_ids[places[of_rows], positions] = batch.input_ids[rows]
        with np.errstate(over="ignore", invalid="ignore"):  # found where it is stored, with the sequence's name
            self._features[places[of_rows], positions] = self._session.features[rows]
        self._num_rows[places] = contexts + counts

    def features_of(self, token_ids: NDArray[np.int32]) -> NDArray[np.float16]:
        """Return the features ``[n, F]`` of the sequence whose committed tokens are ``token_ids [n]``.

        Sequences of the same tokens have the same features (the row law), so it does not matter whose they are: another
        one may have drawn the same so far, and go on.
        """
        num_rows = len(token_ids)
        for place in self._place_of.values():
            if self._num_rows[place] == num_rows and np.array_equal(self._token_ids[place, :num_rows], token_ids):
                return self._features[place, :num_rows].copy()
        raise AssertionError(f"a sequence of {num_rows} tokens that ended in the last step is there")

    def close(self) -> None:
        self._session.close()

    def _place(self, block: int, context: int) -> int:
        """Return the place of the sequence that begins with ``block``, an empty one where it has no context yet."""
        self._num_writes += 1
        if context == 0:
            place = self._place_of.pop(block, -1)
            if place < 0:
                place = self._free_place()
            self._place_of[block] = place
            self._num_rows[place] = 0
        else:
            assert block in self._place_of, "a sequence begins at position 0: the prefix cache is off"
            place = self._place_of[block]
        self._last_write[place] = self._num_writes
        return place

    def _free_place(self) -> int:
        free = set(range(len(self._num_rows))) - set(self._place_of.values())
        if free:
            return min(free)
        block = min(self._place_of, key=lambda block: self._last_write[self._place_of[block]])
        return self._place_of.pop(block)

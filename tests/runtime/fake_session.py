"""A model whose next token is a hash of every token it can see through its own KV pool, and of nothing else.

A wrong block table, slot, position, context length or commit therefore changes the answer; ``answer`` computes what a
request must get, without any pool.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.request import Request
from draftline.sampling import uniform
from draftline.sessions.protocol import DraftBatch, StepBatch, StepResult
from draftline.tree import unpack_mask


def next_token(context: NDArray[np.int32], temperature: float, number: float, vocab_size: int) -> int:
    drawn = int(number * 2**24) if temperature > 0 else -1
    key = context.astype(np.int32).tobytes() + drawn.to_bytes(8, "little", signed=True)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % vocab_size


def answer(request: Request, vocab_size: int) -> list[int]:
    """Compute the tokens of a request served alone (stop words aside)."""
    tokens = list(request.prompt_ids)
    sampling = request.sampling
    for _ in range(request.max_tokens):
        number = float(uniform(sampling.seed, len(tokens))) if sampling.temperature > 0 else 0.0
        token_id = next_token(np.array(tokens, dtype=np.int32), sampling.temperature, number, vocab_size)
        if token_id in request.end_ids:
            break
        tokens.append(token_id)
    return tokens[len(request.prompt_ids) :]


def in_step_masks(batch: StepBatch | DraftBatch) -> list[NDArray[np.bool_]]:
    """Return which in-step rows of each sequence see which, ``[n, n]`` each."""
    starts = batch.sequence_starts.tolist()
    if batch.packed_mask is None:
        return [np.tri(last - first, dtype=np.bool_) for first, last in itertools.pairwise(starts)]
    unpacked = unpack_mask(batch.packed_mask, 32 * batch.packed_mask.shape[1])
    masks = []
    for first, last in itertools.pairwise(starts):
        masks.append(unpacked[first:last, : last - first])
        assert not unpacked[first:last, last - first :].any(), "bits behind a sequence's rows are 0"
    return masks


class FakeSession:
    """Checks the runtime's side of the contract and serves ``next_token``."""

    def __init__(
        self, *, num_blocks: int, block_size: int, vocab_size: int, max_num_tokens: int, key_chunk: int = 0
    ) -> None:
        self.key_chunk = key_chunk
        self.vocab_size = vocab_size
        self.max_num_tokens = max_num_tokens
        self.num_forwards = 0
        self.batches: list[StepBatch] = []
        self.keep_batches = False
        self.failures: list[Exception] = []
        self.broken_token = -1  # rows that see it hold no distribution
        self._block_size = block_size
        self.num_blocks = num_blocks
        self._pool = np.full((num_blocks * block_size, 2), -1, dtype=np.int32)  # (token, position) of each slot
        self._last: StepBatch | None = None
        self.last: StepBatch | None = None  # the forward that was committed last: drafters read its features

    def forward(self, batch: StepBatch) -> StepResult:
        if self.failures:
            raise self.failures.pop(0)
        self.num_forwards += 1
        if self.keep_batches:
            self.batches.append(batch)
        masks = in_step_masks(batch)
        self._check(batch, masks)
        self._last = batch
        contexts = [self._committed(batch, index) for index in range(batch.context_lengths.size)]
        owners = np.searchsorted(batch.sequence_starts, batch.sample_rows, side="right") - 1
        sampled = []
        for index, (row, owner) in enumerate(zip(batch.sample_rows.tolist(), owners.tolist(), strict=True)):
            first, last = batch.sequence_starts[owner : owner + 2].tolist()
            context = np.concatenate([contexts[owner], batch.input_ids[first:last][masks[owner][row - first]]])
            temperature, number = float(batch.temperature[index]), float(batch.uniform[index])
            drawn = next_token(context, temperature, number, self.vocab_size)
            sampled.append(-1 if self.broken_token in context else drawn)
        return StepResult(np.array(sampled, dtype=np.int32))

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert self._last is not None, "a commit follows a forward"
        assert rows.dtype == slots.dtype == np.int64
        assert rows.shape == slots.shape
        assert len(set(slots.tolist())) == slots.size, "two rows are written to one slot"
        assert np.all((rows >= 0) & (rows < self._last.input_ids.size))
        assert np.all((slots >= 0) & (slots < self.num_blocks * self._block_size))
        kept = self._last.input_ids[rows[np.isin(rows, self._last.sample_rows)]]
        assert self.broken_token not in kept, "rows that drew nothing are not committed"
        self._pool[slots, 0] = self._last.input_ids[rows]
        self._pool[slots, 1] = self._last.position_ids[rows]
        self.last, self._last = self._last, None

    def close(self) -> None:
        pass

    def _check(self, batch: StepBatch, masks: list[NDArray[np.bool_]]) -> None:
        num_tokens, num_sequences = batch.input_ids.size, batch.context_lengths.size
        arrays: Sequence[NDArray[np.int32]] = (
            batch.input_ids,
            batch.position_ids,
            batch.sequence_starts,
            batch.context_lengths,
            batch.block_table,
            batch.sample_rows,
            batch.top_k,
        )
        assert all(array.dtype == np.int32 for array in arrays)
        assert 0 < num_tokens <= self.max_num_tokens
        assert batch.sequence_starts.shape == (num_sequences + 1,)
        assert batch.sequence_starts[0] == 0
        assert batch.sequence_starts[-1] == num_tokens
        assert np.all(np.diff(batch.sequence_starts) > 0)
        assert batch.block_table.shape[0] == num_sequences
        assert np.all((batch.block_table >= -1) & (batch.block_table < self.num_blocks))
        assert np.all((batch.sample_rows >= 0) & (batch.sample_rows < num_tokens))
        sampling = (batch.temperature, batch.top_k, batch.top_p, batch.uniform)
        assert all(array.shape == batch.sample_rows.shape for array in sampling)
        for index in range(num_sequences):
            first, last = batch.sequence_starts[index : index + 2].tolist()
            context_length = int(batch.context_lengths[index])
            mask = masks[index]
            expected = context_length + mask.sum(axis=1) - 1
            assert np.array_equal(batch.position_ids[first:last], expected)
            assert not np.any(np.triu(mask, 1)), "children stand behind their parents"
            assert np.all(mask.diagonal())
            branches = not np.array_equal(mask, np.tri(last - first, dtype=bool))
            if self.key_chunk and branches:
                assert context_length // self.key_chunk == (context_length + last - first - 1) // self.key_chunk

        for first in range(num_sequences):
            for second in range(first):
                self._check_sharing(batch.block_table[first], batch.block_table[second])

    def _check_sharing(self, first: NDArray[np.int32], second: NDArray[np.int32]) -> None:
        """Two sequences share a prefix or nothing; a stale id in the padding would be found here as well."""
        num_shared = np.intersect1d(first[first >= 0], second[second >= 0]).size
        assert np.array_equal(first[:num_shared], second[:num_shared]), "a block is shared, its prefix is not"

    def _committed(self, batch: StepBatch, sequence: int) -> NDArray[np.int32]:
        """Read the tokens of a context back from the pool."""
        positions = np.arange(int(batch.context_lengths[sequence]))
        blocks = batch.block_table[sequence, positions // self._block_size].astype(np.int64)
        assert np.all(blocks >= 0), "the block table covers the context"
        committed = self._pool[blocks * self._block_size + positions % self._block_size]
        assert np.array_equal(committed[:, 1], positions), "a slot holds another position"
        tokens: NDArray[np.int32] = committed[:, 0]
        return tokens

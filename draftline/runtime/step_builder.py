"""From scheduled sequences to the arrays of one forward. No work here grows with the length of a context."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.limits import EngineLimits
from draftline.runtime.sequence import Sequence
from draftline.sampling import uniform
from draftline.sessions.protocol import StepBatch


class StepBuilder:
    """Hold what does not change from step to step, one row ("seat") per running sequence, and gather it per step."""

    def __init__(self, limits: EngineLimits) -> None:
        num_seats = limits.max_batch_size
        self._block_size = limits.block_size
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self._block_tables = np.full((num_seats, limits.max_blocks_per_sequence), -1, dtype=np.int32)
        self._temperature = np.zeros(num_seats, dtype=np.float32)
        self._top_k = np.zeros(num_seats, dtype=np.int32)
        self._top_p = np.ones(num_seats, dtype=np.float32)
        self._seeds = np.zeros(num_seats, dtype=np.uint64)

    def take_seat(self, sequence: Sequence) -> None:
        """Give a sequence a row for its block table and sampling parameters."""
        sequence.seat = seat = self._free_seats.pop()
        sampling = sequence.request.sampling
        self._temperature[seat] = sampling.temperature
        self._top_k[seat] = sampling.top_k
        self._top_p[seat] = sampling.top_p
        self._seeds[seat] = sampling.seed

    def leave_seat(self, sequence: Sequence) -> None:
        self._block_tables[sequence.seat] = -1
        self._free_seats.append(sequence.seat)
        sequence.seat = -1

    def append_blocks(self, sequence: Sequence, block_ids: list[int]) -> None:
        first = len(sequence.block_ids)
        self._block_tables[sequence.seat, first : first + len(block_ids)] = block_ids
        sequence.block_ids.extend(block_ids)

    def replace_block(self, sequence: Sequence, index: int, block_id: int) -> None:
        self._block_tables[sequence.seat, index] = block_id
        sequence.block_ids[index] = block_id

    def build(self, sequences: Many[Sequence]) -> tuple[StepBatch, NDArray[np.int64]]:
        """Build the batch of the scheduled tokens, and the slot of every row.

        Shapes: ``slot_mapping [T] int64``; in the batch, ``block_table [B, max_blocks]`` is cut to the widest context
        of this step (at least one column), and R may be 0 when every sequence is in the middle of its prompt.
        """
        num_sequences = len(sequences)
        seats = np.fromiter((sequence.seat for sequence in sequences), np.int64, num_sequences)
        counts = np.fromiter((sequence.num_scheduled for sequence in sequences), np.int32, num_sequences)
        context_lengths = np.fromiter((sequence.num_committed for sequence in sequences), np.int32, num_sequences)
        is_sampled = np.fromiter((sequence.is_sampled for sequence in sequences), np.bool_, num_sequences)
        starts = np.zeros(num_sequences + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])

        input_ids = np.empty(int(starts[-1]), dtype=np.int32)
        row = 0
        for sequence in sequences:
            first, count = sequence.num_committed, sequence.num_scheduled
            input_ids[row : row + count] = sequence.token_ids[first : first + count]
            row += count

        position_ids = np.arange(row, dtype=np.int32) + np.repeat(context_lengths - starts[:-1], counts)
        blocks, offsets = np.divmod(position_ids, self._block_size)
        slot_mapping = self._block_tables[np.repeat(seats, counts), blocks].astype(np.int64)
        slot_mapping *= self._block_size
        slot_mapping += offsets

        num_columns = max(1, -(-int(context_lengths.max()) // self._block_size))
        sampled_seats = seats[is_sampled]
        batch = StepBatch(
            input_ids=input_ids,
            position_ids=position_ids,
            sequence_starts=starts,
            context_lengths=context_lengths,
            block_table=self._block_tables[seats, :num_columns],
            sample_rows=starts[1:][is_sampled] - np.int32(1),
            temperature=self._temperature[sampled_seats],
            top_k=self._top_k[sampled_seats],
            top_p=self._top_p[sampled_seats],
            uniform=uniform(self._seeds[sampled_seats], (context_lengths + counts)[is_sampled]),
        )
        return batch, slot_mapping

"""The step of one sequence, for what runs a text through a network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftline.sessions.protocol import StepBatch


def plain_step(ids: Sequence[int], first: int, block_size: int) -> StepBatch:
    """Build the step of one sequence whose ``first`` tokens are committed, in the pool's blocks in order.

    Every row is sampled, greedily.
    """
    num_rows = len(ids)
    return StepBatch(
        input_ids=np.array(ids, np.int32),
        position_ids=np.arange(first, first + num_rows, dtype=np.int32),
        sequence_starts=np.array([0, num_rows], np.int32),
        context_lengths=np.array([first], np.int32),
        block_table=np.arange(-(-(first + num_rows) // block_size), dtype=np.int32)[None],
        sample_rows=np.arange(num_rows, dtype=np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        uniform=np.zeros(num_rows, np.float32),
    )

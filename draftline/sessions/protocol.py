"""The Session protocol: what an engine does for the runtime. Host integers in, host integers out.

Source: the step contract of the project's design ("commit on accept"): a forward never writes the KV pool; only
``commit`` does, with the rows that were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepBatch:
    """The packed tokens of one forward.

    Shapes: T tokens in B sequences, R sampled rows, W = ceil(max in-step tokens of a sequence / 32) mask words.

    - ``input_ids [T] int32``: tokens of sequence b are rows ``sequence_starts[b] : sequence_starts[b + 1]``.
    - ``position_ids [T] int32``: ``context_lengths[b]`` + depth of the row in its tree (chain: 0, 1, 2, ...).
    - ``sequence_starts [B + 1] int32``, ``context_lengths [B] int32`` (committed tokens of each sequence in the pool).
    - ``block_table [B, max_blocks] int32``: padded with -1; covers at least ``context_lengths[b]`` tokens.
    - ``packed_mask [T, W] int32`` or None for causal: bit j of a row = may attend to in-step token j of its own
      sequence (least significant bit first; reflexive). Committed tokens are always attended.
    - ``sample_rows [R] int32``: rows whose next token is drawn; with per-row ``temperature`` (0 = greedy), ``top_k``
      (0 = off), ``top_p`` (1 = off) and one ``uniform`` in [0, 1) per row, all ``[R]``.
    """

    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    sequence_starts: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    block_table: NDArray[np.int32]
    sample_rows: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    uniform: NDArray[np.float32]
    packed_mask: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class StepResult:
    """``sampled_ids [R] int32``: the target's token after each of ``StepBatch.sample_rows``, in that order."""

    sampled_ids: NDArray[np.int32]


class Session(Protocol):
    """An engine loaded for execution: same contract for onnxruntime, tensorrt and tensorrt_rtx."""

    def forward(self, batch: StepBatch) -> StepResult:
        """Run one forward. The pool is not written; the new KV rows stay with the session until the next forward."""
        ...

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write KV rows of the last forward into the pool: ``rows[i]`` to slot ``slots[i]`` (block * S + offset)."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...

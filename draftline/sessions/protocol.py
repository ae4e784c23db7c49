"""The Session protocol: what an engine does for the runtime. Host integers in, host integers out.

Source: the step contract of the project's design ("commit on accept"): a forward never writes the KV pool; only
``commit`` does, with the rows that were accepted. Hidden features stay with the sessions: a draft session reads those
of the target session it was opened beside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.logit_edits import LogitEdits


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
    - ``edits``: changes to the logits of sampled rows, None = none.
    - ``wants_logits``: whether ``StepResult.logits`` is needed.
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
    edits: LogitEdits | None = None
    wants_logits: bool = False


@dataclass(frozen=True)
class StepResult:
    """What the target drew after each of ``StepBatch.sample_rows``, in that order.

    Shapes: ``sampled_ids [R] int32``, -1 where the row's logits hold no distribution (NaN, inf, or none above -inf);
    ``logits [R, V] float32``, unedited, None unless wanted; ``head_ids`` and
    ``head_log_probs [R, heads, k]``, the candidates of Medusa heads by depth, most probable first, None without heads.
    """

    sampled_ids: NDArray[np.int32]
    logits: NDArray[np.float32] | None = None
    head_ids: NDArray[np.int32] | None = None
    head_log_probs: NDArray[np.float32] | None = None


class Session(Protocol):
    """An engine loaded for execution: same contract for onnxruntime, tensorrt and tensorrt_rtx.

    ``key_chunk``: keys are summed in chunks of so many positions. Rows of a tree equal those of plain decoding to the
    last bit where its nodes do not reach over a multiple of ``key_chunk``; chains always do. 0 = trees always do.
    ``num_blocks``: of the pool, at most as many as the engine was built for.
    """

    key_chunk: int
    num_blocks: int

    def forward(self, batch: StepBatch) -> StepResult:
        """Run one forward. The pool is not written; the new KV rows stay with the session until the next forward."""
        ...

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write KV rows of the last forward into the pool: ``rows[i]`` to slot ``slots[i]`` (block * S + offset)."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...


@dataclass(frozen=True)
class DraftBatch:
    """The packed rows of one forward of a drafter with its own KV.

    A step drafts with several forwards. The first runs rows of known tokens; each later one runs the nodes of one
    depth, which attend to nodes of earlier forwards of the same step as in-step KV. Every row that a forward of this
    step ran has an id: the first forward's rows are 0, 1, ..., the second's go on from there.

    Shapes: N new rows, which this forward computes; T >= N in-step rows in B sequences, old ones and new ones; R rows
    of which candidates are wanted; W = ceil(max in-step rows of a sequence / 32).

    - ``is_first``: whether the step begins: rows and ids of the step before are forgotten.
    - ``input_ids``, ``position_ids [N] int32``: of the new rows, in the order of their ids.
    - ``feature_rows [N] int32``: what is fed to a head beside the token. >= 0: the target's features that
      ``keep_features`` put in this place. < 0: this drafter's own output at row id ``-1 - value``. Ignored by a draft
      model. One forward has rows of one kind only.
    - ``row_ids [T] int32``: ids of the in-step rows, packed by sequence as ``sequence_starts`` says, parents before
      children. Every new row is among them once.
    - ``context_lengths``, ``block_table``: as in ``StepBatch``, of the drafter's own pool.
    - ``packed_mask [T, W] int32`` or None for causal: as in ``StepBatch``, among in-step rows of the sequence.
    - ``candidate_rows [R] int32``: indices 0..N-1 into the new rows.
    - ``temperature``, ``top_k``, ``top_p``, ``uniform [R]``: as in ``StepBatch``, for draft models, which also draw a
      token with the random number that the target will use there (common random numbers).
    """

    is_first: bool
    input_ids: NDArray[np.int32]
    position_ids: NDArray[np.int32]
    feature_rows: NDArray[np.int32]
    sequence_starts: NDArray[np.int32]
    row_ids: NDArray[np.int32]
    context_lengths: NDArray[np.int32]
    block_table: NDArray[np.int32]
    candidate_rows: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    uniform: NDArray[np.float32]
    packed_mask: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class DraftResult:
    """Candidates after each of ``DraftBatch.candidate_rows``: ``token_ids [R, k] int32`` of the target's vocabulary,
    most probable first, and ``log_probs [R, k] float32``. ``sampled_ids [R] int32`` from draft models, else None."""

    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sampled_ids: NDArray[np.int32] | None = None


class DraftSession(Protocol):
    """A drafter's graph loaded for execution beside a target session, with a pool of as many blocks as the target's."""

    def keep_features(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Keep the target's features at ``rows`` of its last forward in ``places`` (0, 1, ...) until they are replaced.

        Heads alone.
        """
        ...

    def forward(self, batch: DraftBatch) -> DraftResult:
        """Run one forward. The pool is not written; rows stay with the session until a forward begins a new step."""
        ...

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write KV rows of this step into the pool: ``row_ids[i]`` to slot ``slots[i]``."""
        ...

    def close(self) -> None:
        """Release the engine."""
        ...

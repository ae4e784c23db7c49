"""A drafter on ONNX Runtime, beside the target session whose features it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.batch_split import StepCost
from draftline.sessions.engine_config import EngineConfig, draft_model_file
from draftline.sessions.onnxruntime_graph import OnnxRuntimeGraph
from draftline.sessions.passes import choose_passes
from draftline.sessions.protocol import DraftBatch, DraftResult, StepBatch
from draftline.tree import causal_mask


class HasFeatures(Protocol):
    """Whoever has the features ``[T, F]`` that an EAGLE head reads: the target's session, after a forward of T rows."""

    @property
    def features(self) -> NDArray[np.float32]: ...


class OnnxRuntimeDraftSession:
    """Implements ``DraftSession``: drafter ``index`` of the engine, an EAGLE head or a draft model.

    A step's rows stay in one array per forward: keys and values, and the outputs a head is fed with at the next depth.
    Features of the target that rows are fed with are copied when they are kept: they outlive the target's forward.
    A first forward runs in passes, as the target's steps do.
    """

    def __init__(self, directory: Path, config: EngineConfig, index: int, target_session: HasFeatures) -> None:
        self._draft, self._target = config.drafts[index], target_session
        draft = self._draft
        pool_shape = (
            draft.num_layers,
            config.max_blocks,
            2,
            draft.num_key_value_heads,
            config.block_size,
            draft.head_size,
        )
        path = directory / draft_model_file(index)
        self._graph = OnnxRuntimeGraph(path, config, pool_shape, takes_turns=True)
        self._is_head = draft.feature_size > 0
        self._row_names = ("kv_rows", "hidden") if self._is_head else ("kv_rows",)
        self._sample_names = ("candidate_ids", "candidate_log_probs", *(() if self._is_head else ("sampled_ids",)))
        self._features = np.empty((0, draft.feature_size), np.float32)  # kept ones of the target, by place
        cost = StepCost.of_draft(draft)
        self._passes = choose_passes(config, cost, repeats_single_rows=False)
        self._no_kept_kv = np.empty(
            (0, 2 * draft.num_layers * draft.num_key_value_heads, draft.head_size), config.pool_dtype
        )
        # Rows of this step, by forward: the id of its first row, and its rows.
        self._first_ids: list[int] = []
        self._kv_rows: list[NDArray[Any]] = []  # of the pool's dtype
        self._hidden: list[NDArray[np.float32]] = []
        self._num_rows = 0

    def forward(self, batch: DraftBatch) -> DraftResult:
        if batch.is_first:
            self._first_ids, self._kv_rows, self._hidden, self._num_rows = [], [], [], 0
        num_new = len(batch.input_ids)
        may_split = batch.is_first and np.array_equal(batch.row_ids, np.arange(num_new))
        features = self._feature_feeds(batch.feature_rows) if self._is_head else {}

        def run_pass(part: StepBatch, rows: NDArray[np.int64] | slice) -> dict[str, NDArray[Any]]:
            row_ids = np.arange(len(part.input_ids)) if may_split else batch.row_ids
            chosen = {name: value[rows] if len(value) else value for name, value in features.items()}
            return self._run_pass(part, self._in_step_feeds(row_ids) | chosen)

        results = self._passes.run(_step_of(batch), run_pass, may_split=may_split)
        self._first_ids.append(self._num_rows)
        self._num_rows += num_new
        self._kv_rows.append(results["kv_rows"])
        if self._is_head:
            self._hidden.append(results["hidden"])
        sampled = results.get("sampled_ids")
        return DraftResult(
            results["candidate_ids"].astype(np.int32),
            results["candidate_log_probs"],
            None if sampled is None else sampled.astype(np.int32),
        )

    def keep_features(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        num_places = int(places.max(initial=-1)) + 1
        if num_places > len(self._features):
            larger = np.empty((max(num_places, 2 * len(self._features)), self._draft.feature_size), np.float32)
            larger[: len(self._features)] = self._features
            self._features = larger
        first = self._draft.feature_start
        self._features[places] = self._target.features[rows, first : first + self._draft.feature_size]

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        for first_id, kv_rows in zip(self._first_ids, self._kv_rows, strict=True):
            chosen = np.flatnonzero((row_ids >= first_id) & (row_ids < first_id + len(kv_rows)))
            if chosen.size:
                self._graph.write_rows(kv_rows, row_ids[chosen] - first_id, slots[chosen])

    def close(self) -> None:
        self._graph.close()

    def _feature_feeds(self, feature_rows: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
        draft = self._draft
        target = np.empty((0, draft.feature_size), np.float32)
        own = np.empty((0, draft.hidden_size), np.float32)
        if feature_rows[0] >= 0:
            target = self._features[feature_rows]
        else:
            own = self._gather(self._hidden, -1 - feature_rows.astype(np.int64))
        return {"target_features": target, "own_features": own}

    def _in_step_feeds(self, row_ids: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Number the rows that take part: kept ones in packed order, then the new ones in the order of their ids."""
        is_new = row_ids >= self._num_rows
        kept_ids = row_ids[~is_new].astype(np.int64)
        num_kept = len(kept_ids)
        numbers = np.empty(len(row_ids), np.int32)
        numbers[~is_new] = np.arange(num_kept)
        new_index = row_ids[is_new] - self._num_rows
        numbers[is_new] = new_index + num_kept
        new_rows = np.empty(len(new_index), np.int32)
        new_rows[new_index] = np.flatnonzero(is_new)
        kept_kv = self._gather(self._kv_rows, kept_ids) if num_kept else self._no_kept_kv
        return {"kept_kv": kept_kv, "row_ids": numbers, "new_rows": new_rows}

    def _gather(self, by_forward: list[NDArray[Any]], ids: NDArray[np.int64]) -> NDArray[Any]:
        """Take rows of this step by id out of the arrays of its forwards."""
        gathered = np.empty((len(ids), *by_forward[0].shape[1:]), by_forward[0].dtype)
        forwards = np.searchsorted(self._first_ids, ids, side="right") - 1
        for forward in np.unique(forwards):
            chosen = np.flatnonzero(forwards == forward)
            gathered[chosen] = by_forward[forward][ids[chosen] - self._first_ids[forward]]
        return gathered

    def _run_pass(self, step: StepBatch, in_step: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        mask = causal_mask(step.sequence_starts) if step.packed_mask is None else step.packed_mask
        sampling: dict[str, NDArray[Any]] = {"candidate_rows": step.sample_rows}
        if not self._is_head:
            sampling |= {name: getattr(step, name) for name in ("temperature", "top_k", "top_p", "uniform")}
        num_candidates = len(step.sample_rows)
        if not num_candidates:  # one greedy row keeps every shape above zero
            sampling = {name: np.full(1, name == "top_p", value.dtype) for name, value in sampling.items()}
        feeds = {
            "input_ids": step.input_ids,
            "position_ids": step.position_ids,
            "block_table": np.ascontiguousarray(step.block_table),
            "context_lengths": step.context_lengths,
            "sequence_starts": step.sequence_starts,
            "packed_mask": np.ascontiguousarray(mask),
        }
        outputs = self._graph.run(feeds | in_step | sampling, (*self._sample_names, *self._row_names))
        return outputs | {name: outputs[name][:num_candidates] for name in self._sample_names}


def _step_of(batch: DraftBatch) -> StepBatch:
    """The forward as a step of the target's kind, whose sampled rows are those with candidates."""
    return StepBatch(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        sequence_starts=batch.sequence_starts,
        context_lengths=batch.context_lengths,
        block_table=batch.block_table,
        sample_rows=batch.candidate_rows,
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        uniform=batch.uniform,
        packed_mask=batch.packed_mask,
    )

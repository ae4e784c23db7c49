"""A session on ONNX Runtime: the embedded default, on any CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.logit_edits import NO_EDITS, LogitEdits
from draftline.sessions.batch_split import KEY_CHUNK, StepCost, split_batch
from draftline.sessions.engine_config import METHODS_WITH_SESSIONS, MODEL_FILE, EngineConfig
from draftline.sessions.onnxruntime_graph import OnnxRuntimeGraph
from draftline.sessions.protocol import StepBatch, StepResult
from draftline.tree import causal_mask


class OnnxRuntimeSession:
    """Implements ``Session``. The pool is one numpy array ``[layers, max_blocks, 2, K, S, D] float32``, read in place.

    A step whose sequences differ much in rows or keys runs as several forwards (``batch_split``): the function body
    pads sequences to the longest one. Results do not depend on the split, by the row law of the graph.
    """

    key_chunk = KEY_CHUNK

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        model, self._config = config.model, config
        pool_shape = (
            model.num_hidden_layers,
            config.max_blocks,
            2,
            model.num_key_value_heads,
            config.block_size,
            model.head_size,
        )
        self._graph = OnnxRuntimeGraph(
            directory / MODEL_FILE,
            config.num_threads,
            pool_shape,
            takes_turns=any(draft.method in METHODS_WITH_SESSIONS for draft in config.drafts),
        )
        self._cost = StepCost.of_model(model, config.weights_dtype)
        self._head_names = ("head_ids", "head_log_probs") if any(draft.num_heads for draft in config.drafts) else ()
        self._row_names = (
            ("kv_rows", "features") if any(draft.feature_size for draft in config.drafts) else ("kv_rows",)
        )
        # Uncommitted rows of the last step: part and index inside the part of every row, and each part's kv_rows.
        self._part_of_row: NDArray[np.int64] = np.empty(0, np.int64)
        self._index_in_part: NDArray[np.int64] = np.empty(0, np.int64)
        self._kv_rows: list[NDArray[np.float32]] = []
        self._features: NDArray[np.float32] | None = None

    @property
    def features(self) -> NDArray[np.float32]:
        """What EAGLE heads read of the last forward: ``[T, F]``, row t of the step; only of engines with such heads."""
        assert self._features is not None, "features are those of a forward"
        return self._features

    def forward(self, batch: StepBatch) -> StepResult:
        logits = ("logits",) if batch.wants_logits else ()
        outputs = self._run(batch, ("sampled_ids", *logits, *self._head_names))
        head_ids = outputs.get("head_ids")
        return StepResult(
            outputs["sampled_ids"].astype(np.int32),
            outputs.get("logits"),
            None if head_ids is None else head_ids.astype(np.int32),
            outputs.get("head_log_probs"),
        )

    def forward_logits(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one forward and return the logits ``[R, V] float32`` of the sampled rows: for checks and oracles."""
        return self._run(batch, ("logits",))["logits"]

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        parts = self._part_of_row[rows]
        for part, kv_rows in enumerate(self._kv_rows):
            chosen = np.flatnonzero(parts == part)
            if chosen.size:
                self._graph.write_rows(kv_rows, self._index_in_part[rows[chosen]], slots[chosen])

    def close(self) -> None:
        self._graph.close()

    def _run(self, batch: StepBatch, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        parts = split_batch(batch, self._cost, self._config.block_size)
        num_rows = len(batch.input_ids)
        self._part_of_row = np.zeros(num_rows, np.int64)
        self._index_in_part = np.arange(num_rows)
        self._kv_rows, self._features = [], None
        results: dict[str, NDArray[Any]] = {}
        for index, part in enumerate(parts):
            outputs = self._run_part(part.batch, names)
            self._kv_rows.append(outputs.pop("kv_rows"))
            self._part_of_row[part.rows] = index
            self._index_in_part[part.rows] = np.arange(len(part.rows))
            if "features" in outputs:
                self._keep_features(outputs.pop("features"), part.rows, num_rows)
            for name, value in outputs.items():
                if name not in results:
                    results[name] = np.empty((len(batch.sample_rows), *value.shape[1:]), value.dtype)
                results[name][part.samples] = value
        return results

    def _keep_features(self, features: NDArray[np.float32], rows: NDArray[np.int64], num_rows: int) -> None:
        if len(rows) == num_rows:
            self._features = features
            return
        if self._features is None:
            self._features = np.empty((num_rows, features.shape[1]), np.float32)
        self._features[rows] = features[: len(rows)]

    def _run_part(self, batch: StepBatch, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        num_samples = len(batch.sample_rows)
        if self._config.weights_dtype == "int4" and len(batch.input_ids) == 1:
            batch = _twice(batch)  # without AVX-512, the 4-bit kernel sums a single row in another order
        outputs = self._graph.run(_feeds(batch), (*names, *self._row_names))
        return {name: value if name in self._row_names else value[:num_samples] for name, value in outputs.items()}


def _feeds(batch: StepBatch) -> dict[str, NDArray[Any]]:
    mask = causal_mask(batch.sequence_starts) if batch.packed_mask is None else batch.packed_mask
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "block_table": batch.block_table,
        "context_lengths": batch.context_lengths,
        "sequence_starts": batch.sequence_starts,
        "packed_mask": np.ascontiguousarray(mask),
    }
    sampling: dict[str, NDArray[Any]] = {
        "sample_rows": batch.sample_rows,
        "temperature": batch.temperature,
        "top_k": batch.top_k,
        "top_p": batch.top_p,
        "uniform": batch.uniform,
    }
    if not len(batch.sample_rows):  # a prefill chunk that is not the last: one greedy row keeps every shape above zero
        neutral = {"top_p": 1}
        sampling = {name: np.full(1, neutral.get(name, 0), value.dtype) for name, value in sampling.items()}
    return feeds | sampling | _edit_feeds(batch.edits)


def _edit_feeds(edits: LogitEdits | None) -> dict[str, NDArray[Any]]:
    return {f"edit_{field.name}": getattr(edits or NO_EDITS, field.name) for field in fields(LogitEdits)}


def _twice(batch: StepBatch) -> StepBatch:
    """Repeat the only sequence of a step of one row; its copy is computed and dropped."""
    mask = batch.packed_mask
    return replace(
        batch,
        input_ids=batch.input_ids.repeat(2),
        position_ids=batch.position_ids.repeat(2),
        sequence_starts=np.array([0, 1, 2], np.int32),
        context_lengths=batch.context_lengths.repeat(2),
        block_table=batch.block_table.repeat(2, axis=0),
        packed_mask=None if mask is None else mask.repeat(2, axis=0),
    )

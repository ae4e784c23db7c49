"""A session on ONNX Runtime: the embedded default, on any CPU."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.logit_edits import NO_EDITS, LogitEdits
from draftline.sessions.batch_split import StepCost
from draftline.sessions.engine_config import METHODS_WITH_SESSIONS, MODEL_FILE, EngineConfig
from draftline.sessions.onnxruntime_graph import OnnxRuntimeGraph
from draftline.sessions.passes import choose_passes
from draftline.sessions.protocol import StepBatch, StepResult
from draftline.tree import causal_mask


class OnnxRuntimeSession:
    """Implements ``Session``. The pool is one numpy array ``[layers, max_blocks, 2, K, S, D]``, read in place.

    A step is one forward, or several where that is cheaper for the operators of the engine (``passes``).
    """

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        model = config.model
        pool_shape = (
            model.num_hidden_layers,
            config.max_blocks,
            2,
            model.num_key_value_heads,
            config.block_size,
            model.head_size,
        )
        takes_turns = any(draft.method in METHODS_WITH_SESSIONS for draft in config.drafts)
        self._graph = OnnxRuntimeGraph(directory / MODEL_FILE, config, pool_shape, takes_turns=takes_turns)
        cost = StepCost.of_model(model, config.weights_dtype)
        self._passes = choose_passes(config, cost, repeats_single_rows=config.weights_dtype == "int4")
        self.key_chunk, self.num_blocks = self._passes.key_chunk, config.max_blocks
        self._head_names = ("head_ids", "head_log_probs") if any(draft.num_heads for draft in config.drafts) else ()
        self._row_names = ("kv_rows", "features") if config.has_features else ("kv_rows",)
        # Of every row of the last step; keys and values in the pool's dtype.
        self._kv_rows: NDArray[Any] | None = None
        self._features: NDArray[np.float32] | None = None

    @property
    def features(self) -> NDArray[np.float32]:
        """What EAGLE heads and trainers read of the last forward: ``[T, F]``, row t of the step.

        Only of engines whose config ``has_features``.
        """
        assert self._features is not None, "features are those of a forward"
        return self._features

    @property
    def kv_rows(self) -> NDArray[Any]:
        """Keys and values of the rows of the last forward: ``[T, 2 * layers * K, D]`` of the pool's dtype."""
        assert self._kv_rows is not None, "rows are those of a forward"
        return self._kv_rows

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
        assert self._kv_rows is not None, "rows are those of a forward"
        self._graph.write_rows(self._kv_rows, rows, slots)

    def close(self) -> None:
        self._graph.close()

    def _run(self, batch: StepBatch, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        self._kv_rows = self._features = None  # before others take their place in memory

        def run_pass(part: StepBatch, rows: object) -> dict[str, NDArray[Any]]:
            outputs = self._graph.run(step_feeds(part), (*names, *self._row_names))
            num_samples = len(part.sample_rows)
            return {name: value if name in self._row_names else value[:num_samples] for name, value in outputs.items()}

        outputs = self._passes.run(batch, run_pass)
        self._kv_rows, self._features = outputs.pop("kv_rows"), outputs.pop("features", None)
        return outputs


def step_feeds(batch: StepBatch) -> dict[str, NDArray[Any]]:
    """Return the inputs of the target's graph for one forward, pools excepted, by name."""
    mask = causal_mask(batch.sequence_starts) if batch.packed_mask is None else batch.packed_mask
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "block_table": np.ascontiguousarray(batch.block_table),
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
    return feeds | sampling | (NO_EDIT_FEEDS if batch.edits is None else _edit_feeds(batch.edits))


def _edit_feeds(edits: LogitEdits) -> dict[str, NDArray[Any]]:
    return {f"edit_{field.name}": getattr(edits, field.name) for field in fields(LogitEdits)}


NO_EDIT_FEEDS = _edit_feeds(NO_EDITS)  # the same arrays in every step, which stay bound

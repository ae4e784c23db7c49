"""A session on ONNX Runtime: the embedded default, on any CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import ArtifactError, MissingPackageError
from draftline.logit_edits import NO_EDITS, LogitEdits
from draftline.sessions.batch_split import KEY_CHUNK, StepCost, split_batch
from draftline.sessions.engine_config import EngineConfig
from draftline.sessions.onnxruntime_builder import MODEL_FILE
from draftline.sessions.protocol import StepBatch, StepResult


class OnnxRuntimeSession:
    """Implements ``Session``. The pool is one numpy array ``[layers, max_blocks, 2, K, S, D] float32``, read in place.

    A step whose sequences differ much in rows or keys runs as several forwards (``batch_split``): the function body
    pads sequences to the longest one. Results do not depend on the split, by the row law of the graph.
    """

    key_chunk = KEY_CHUNK

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise MissingPackageError(
                "engine.backend: onnxruntime", "needs the package onnxruntime", "none", "run `pip install onnxruntime`"
            ) from None
        state = onnxruntime.capi.onnxruntime_pybind11_state
        self._failures = (state.Fail, state.RuntimeException, state.InvalidArgument, state.EPFail)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = config.num_threads
        options.enable_mem_pattern = False  # every step has other shapes
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(directory / MODEL_FILE), options, providers=["CPUExecutionProvider"]
            )
        except (*self._failures, state.NoSuchFile, state.InvalidGraph, state.InvalidProtobuf) as error:
            raise ArtifactError(
                directory / MODEL_FILE, "is a graph that ONNX Runtime loads", str(error), "build the engine again"
            ) from error
        model = config.model
        self._check_pools(directory, config)
        self._config = config
        self._kv_shape = (model.num_key_value_heads, model.head_size)
        self._pool = np.zeros(
            (
                model.num_hidden_layers,
                config.max_blocks,
                2,
                model.num_key_value_heads,
                config.block_size,
                model.head_size,
            ),
            np.float32,
        )
        self._binding = self._session.io_binding()
        self._pool_values = [onnxruntime.OrtValue.ortvalue_from_numpy(layer) for layer in self._pool]
        for layer, value in enumerate(self._pool_values):
            self._binding.bind_ortvalue_input(f"kv_pool.{layer}", value)
        self._causal_mask = _causal_mask(config.max_num_tokens)
        self._cost = StepCost.of_model(model, config.weights_dtype)
        # Uncommitted rows of the last step: part and index inside the part of every row, and each part's kv_rows.
        self._part_of_row: NDArray[np.int64] = np.empty(0, np.int64)
        self._index_in_part: NDArray[np.int64] = np.empty(0, np.int64)
        self._kv_rows: list[NDArray[np.float32]] = []

    def _check_pools(self, directory: Path, config: EngineConfig) -> None:
        """Raise ArtifactError unless the graph reads the pools that ``config`` describes."""
        model = config.model
        shape = [2, model.num_key_value_heads, config.block_size, model.head_size]
        described = {f"kv_pool.{layer}": shape for layer in range(model.num_hidden_layers)}
        inputs = {value.name: value.shape[1:] for value in self._session.get_inputs() if "kv_pool." in value.name}
        if inputs != described:
            got = f"{len(inputs)} layers of {next(iter(inputs.values()), None)}"
            rule = f"reads the pools of config.json, {len(described)} layers of {shape}"
            raise ArtifactError(directory / MODEL_FILE, rule, got, "build the engine again")

    def forward(self, batch: StepBatch) -> StepResult:
        names = ("sampled_ids", "logits") if batch.wants_logits else ("sampled_ids",)
        outputs, _ = self._run(batch, names)
        return StepResult(outputs["sampled_ids"].astype(np.int32), outputs.get("logits"))

    def forward_logits(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one forward and return the logits ``[R, V] float32`` of the sampled rows: for checks and oracles."""
        outputs, _ = self._run(batch, ("logits",))
        return outputs["logits"]

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        blocks, offsets = np.divmod(slots, self._config.block_size)
        parts = self._part_of_row[rows]
        for part, kv_rows in enumerate(self._kv_rows):
            chosen = np.flatnonzero(parts == part)
            if not chosen.size:
                continue
            layers = len(self._pool)
            values = kv_rows.reshape(layers, 2, -1, *self._kv_shape)[:, :, self._index_in_part[rows[chosen]]]
            self._pool[:, blocks[chosen], :, :, offsets[chosen]] = values.transpose(2, 0, 1, 3, 4)

    def close(self) -> None:
        del self._binding, self._pool_values, self._session

    def _run(self, batch: StepBatch, names: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], int]:
        parts = split_batch(batch, self._cost, self._config.block_size)
        num_rows = len(batch.input_ids)
        self._part_of_row = np.zeros(num_rows, np.int64)
        self._index_in_part = np.arange(num_rows)
        self._kv_rows = []
        results: dict[str, NDArray[Any]] = {}
        for index, part in enumerate(parts):
            outputs = self._run_part(part.batch, names)
            self._kv_rows.append(outputs.pop("kv_rows"))
            self._part_of_row[part.rows] = index
            self._index_in_part[part.rows] = np.arange(len(part.rows))
            for name, value in outputs.items():
                if name not in results:
                    results[name] = np.empty((len(batch.sample_rows), *value.shape[1:]), value.dtype)
                results[name][part.samples] = value
        return results, len(parts)

    def _run_part(self, batch: StepBatch, names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        num_samples = len(batch.sample_rows)
        if self._config.weights_dtype == "int4" and len(batch.input_ids) == 1:
            batch = _twice(batch)  # without AVX-512, the 4-bit kernel sums a single row in another order
        feeds = _feeds(batch, self._causal_mask)
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)
        for name in (*names, "kv_rows"):
            self._binding.bind_output(name)
        try:
            self._session.run_with_iobinding(self._binding)
            outputs = [value.numpy() for value in self._binding.get_outputs()]
        except self._failures as error:  # direct children of Exception
            raise RuntimeError(f"ONNX Runtime: {error}") from error
        finally:
            self._binding.clear_binding_outputs()  # else the next step returns them too, or they keep their memory
        named = dict(zip((*names, "kv_rows"), outputs, strict=True))
        return {name: value if name == "kv_rows" else value[:num_samples] for name, value in named.items()}


def _feeds(batch: StepBatch, causal_mask: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    lengths = np.diff(batch.sequence_starts)
    mask = batch.packed_mask
    if mask is None:
        in_step = np.arange(len(batch.input_ids)) - np.repeat(batch.sequence_starts[:-1], lengths)
        mask = causal_mask[in_step, : -(-int(lengths.max()) // 32)]
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


def _causal_mask(num_rows: int) -> NDArray[np.int32]:
    bits = np.tri(num_rows, -(-num_rows // 32) * 32, dtype=bool)
    return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)

"""In how many passes of its graph a step runs: one with native operators, several where the function body would pad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.batch_split import KEY_CHUNK, Part, StepCost, fit_columns, split_batch
from draftline.sessions.engine_config import EngineConfig
from draftline.sessions.protocol import StepBatch

ROW_OUTPUTS = ("kv_rows", "features", "hidden")  # have a row for each of a step; other outputs for each sampled row
ALL_ROWS = slice(None)

Outputs = dict[str, NDArray[Any]]
# Runs one forward: of which step, and the places of its rows in the whole one.
RunPass = Callable[[StepBatch, "NDArray[np.int64] | slice"], Outputs]


class Passes(Protocol):
    """``key_chunk``: see ``Session``."""

    key_chunk: int

    def run(self, step: StepBatch, run_pass: RunPass, *, may_split: bool = True) -> Outputs:
        """Run ``step`` in one or more passes and return its outputs as if it had been one."""
        ...


class OnePass:
    """Implements ``Passes`` for native operators, to which ragged steps cost no more than even ones."""

    key_chunk = 0

    def run(self, step: StepBatch, run_pass: RunPass, *, may_split: bool = True) -> Outputs:
        return run_pass(step, ALL_ROWS)


class PaddedPasses:
    """Implements ``Passes`` for the function body of TreeAttention, which pads every sequence to the longest.

    A step whose sequences differ much runs in parts of like ones. Results do not depend on that, by the row law.
    ``repeats_single_rows``: a step of one row runs as two equal ones. Without AVX-512, ONNX Runtime's 4-bit kernel sums
    a single row in another order.
    """

    key_chunk = KEY_CHUNK

    def __init__(self, cost: StepCost, block_size: int, *, repeats_single_rows: bool) -> None:
        self.cost, self._block_size, self._repeats_single_rows = cost, block_size, repeats_single_rows

    def run(self, step: StepBatch, run_pass: RunPass, *, may_split: bool = True) -> Outputs:
        if not may_split:
            return run_pass(self._fit(step), ALL_ROWS)
        if self._repeats_single_rows and len(step.input_ids) == 1:
            outputs = run_pass(self._fit(_twice(step)), ALL_ROWS)
            return {name: value[:1] if name in ROW_OUTPUTS else value for name, value in outputs.items()}
        parts = split_batch(step, self.cost, self._block_size)
        if len(parts) == 1:
            return run_pass(parts[0].batch, ALL_ROWS)
        results: Outputs = {}
        for part in parts:
            _merge(results, run_pass(part.batch, part.rows), part, step)
        return results

    def _fit(self, step: StepBatch) -> StepBatch:
        """Give the block table the columns of whole chunks that the body asks for."""
        num_keys = int((step.context_lengths + np.diff(step.sequence_starts)).max())
        columns = -(-num_keys // KEY_CHUNK) * KEY_CHUNK // self._block_size
        return replace(step, block_table=fit_columns(step.block_table, columns))


def choose_passes(config: EngineConfig, cost: StepCost, *, repeats_single_rows: bool) -> Passes:
    """Return how a graph of this engine runs steps; ``cost`` is that of the graph."""
    if config.kernels == "native":
        return OnePass()
    return PaddedPasses(cost, config.block_size, repeats_single_rows=repeats_single_rows)


def _merge(results: Outputs, outputs: Outputs, part: Part, step: StepBatch) -> None:
    """Put the outputs of a part where they stand in the whole step."""
    for name, value in outputs.items():
        is_by_row = name in ROW_OUTPUTS
        if name not in results:
            size = len(step.input_ids) if is_by_row else len(step.sample_rows)
            results[name] = np.empty((size, *value.shape[1:]), value.dtype)
        results[name][part.rows if is_by_row else part.samples] = value


def _twice(step: StepBatch) -> StepBatch:
    """Repeat the only row of a step as a second sequence, which is computed and dropped."""
    mask = step.packed_mask
    return replace(
        step,
        input_ids=step.input_ids.repeat(2),
        position_ids=step.position_ids.repeat(2),
        sequence_starts=np.array([0, 1, 2], np.int32),
        context_lengths=step.context_lengths.repeat(2),
        block_table=step.block_table.repeat(2, axis=0),
        packed_mask=None if mask is None else mask.repeat(2, axis=0),
    )

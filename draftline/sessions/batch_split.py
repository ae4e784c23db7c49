"""Split a step into parts of like sequences, where padding would cost more than reading the weights again."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.logit_edits import LogitEdits
from draftline.sessions.engine_config import DraftConfig
from draftline.sessions.protocol import StepBatch

WEIGHT_BYTES = {"float32": 4.0, "int8": 1.0, "int4": 0.625}
KEY_CHUNK = 128  # tokens; the function body of TreeAttention sums over keys in chunks of so many
KV_TRAFFIC = 3  # a gathered key is read from the pool, written, and read by the product
FLOPS_PER_BYTE = 8  # arithmetic a CPU core does while it reads a byte from memory


def count_parameters(model: CheckpointConfig) -> int:
    """Count what a forward reads of a model's matrices at most: its layers, with all experts, and its lm_head."""
    q_size = model.num_attention_heads * model.head_size
    kv_size = model.num_key_value_heads * model.head_size
    experts = model.experts
    mlp_size = model.intermediate_size if experts is None else experts.num_experts * experts.intermediate_size
    per_layer = model.hidden_size * (2 * q_size + 2 * kv_size + 3 * mlp_size)
    return model.num_hidden_layers * per_layer + model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class StepCost:
    """The cost of a part in bytes of memory traffic: ``weights + n * keys * (per_key + per_key_and_row * rows)``."""

    weights: float
    per_key: float
    per_key_and_row: float

    @classmethod
    def of_model(cls, model: CheckpointConfig, weights_dtype: str) -> StepCost:
        q_size = model.num_attention_heads * model.head_size
        kv_size = model.num_key_value_heads * model.head_size
        return cls._of_sizes(count_parameters(model), model.num_hidden_layers, q_size, kv_size, weights_dtype)

    @classmethod
    def of_draft(cls, draft: DraftConfig) -> StepCost:
        q_size, kv_size = (n * draft.head_size for n in (draft.num_attention_heads, draft.num_key_value_heads))
        return cls._of_sizes(draft.num_parameters, draft.num_layers, q_size, kv_size, draft.weights_dtype)

    @classmethod
    def _of_sizes(cls, num_parameters: int, layers: int, q_size: int, kv_size: int, weights_dtype: str) -> StepCost:
        return cls(
            weights=num_parameters * WEIGHT_BYTES[weights_dtype],
            per_key=KV_TRAFFIC * layers * 2 * kv_size * 4,
            per_key_and_row=layers * 4 * q_size / FLOPS_PER_BYTE,
        )

    def part(self, num_sequences: int, num_rows: int, num_keys: int) -> float:
        return self.weights + num_sequences * num_keys * (self.per_key + self.per_key_and_row * num_rows)


@dataclass(frozen=True)
class Part:
    """``rows`` and ``samples`` say where the part's packed rows and sampled rows stand in the whole step."""

    batch: StepBatch
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]


def split_batch(batch: StepBatch, cost: StepCost, block_size: int) -> list[Part]:
    """Split a step at the cheapest cuts of its sequences, sorted by rows, then keys. One part if that is cheapest."""
    lengths = np.diff(batch.sequence_starts).astype(np.int64)
    keys = -(-(batch.context_lengths + lengths) // KEY_CHUNK) * KEY_CHUNK  # the function body asks for whole chunks
    order = np.lexsort((keys, lengths))
    cuts = _cheapest_cuts(lengths[order], keys[order], cost)
    if len(cuts) == 1:
        everything = replace(batch, block_table=fit_columns(batch.block_table, int(keys.max()) // block_size))
        return [Part(everything, np.arange(len(batch.input_ids)), np.arange(len(batch.sample_rows)))]
    parts, first = [], 0
    for end in cuts:
        parts.append(_take(batch, np.sort(order[first:end]), lengths, keys, block_size))
        first = end
    return parts


def _cheapest_cuts(lengths: NDArray[np.int64], keys: NDArray[np.int64], cost: StepCost) -> list[int]:
    """Ends of the parts of least total cost, over all ways to cut the sorted sequences (dynamic programming).

    Equal sequences are never cut apart, which would gain nothing: the work is quadratic in the different ones alone.
    """
    is_last_of_equals = np.append((np.diff(lengths) != 0) | (np.diff(keys) != 0), True)
    last = np.flatnonzero(is_last_of_equals)
    rows, most_keys, ends = lengths[last].tolist(), keys[last].tolist(), [0, *(last + 1).tolist()]
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for index in range(len(rows)):
        widest, cheapest, cut = 0, math.inf, 0
        for first in range(index, -1, -1):
            widest = max(widest, most_keys[first])
            total = best[first][0] + cost.part(ends[index + 1] - ends[first], rows[index], widest)
            if total < cheapest:
                cheapest, cut = total, first
        best.append((cheapest, [*best[cut][1], ends[index + 1]]))
    return best[-1][1]


def fit_columns(block_table: NDArray[np.int32], columns: int) -> NDArray[np.int32]:
    """Cut or pad the table: in-step tokens need a key position even where they will never own a slot."""
    have = block_table.shape[1]
    if have >= columns:
        return np.ascontiguousarray(block_table[:, :columns])
    return np.pad(block_table, ((0, 0), (0, columns - have)), constant_values=-1)


def _take(
    batch: StepBatch, sequences: NDArray[np.int64], lengths: NDArray[np.int64], keys: NDArray[np.int64], block_size: int
) -> Part:
    rows = np.concatenate([np.arange(batch.sequence_starts[b], batch.sequence_starts[b + 1]) for b in sequences])
    new_row = np.full(len(batch.input_ids), -1, np.int32)
    new_row[rows] = np.arange(len(rows))
    moved = new_row[batch.sample_rows]
    samples = np.flatnonzero(moved >= 0)
    part = StepBatch(
        input_ids=batch.input_ids[rows],
        position_ids=batch.position_ids[rows],
        sequence_starts=np.concatenate([[0], np.cumsum(lengths[sequences])]).astype(np.int32),
        context_lengths=batch.context_lengths[sequences],
        block_table=fit_columns(batch.block_table[sequences], int(keys[sequences].max()) // block_size),
        sample_rows=moved[samples],
        temperature=batch.temperature[samples],
        top_k=batch.top_k[samples],
        top_p=batch.top_p[samples],
        uniform=batch.uniform[samples],
        packed_mask=None if batch.packed_mask is None else batch.packed_mask[rows],
        edits=None if batch.edits is None else edits_of(batch.edits, samples, len(batch.sample_rows)),
        wants_logits=batch.wants_logits,
    )
    return Part(part, rows, samples)


def edits_of(edits: LogitEdits, samples: NDArray[np.int64], num_samples: int) -> LogitEdits | None:
    """Edits of the sampled rows ``samples`` alone, as edits of rows 0, 1, ...; None where there are none."""
    new_row = np.full(num_samples, -1, np.int32)
    new_row[samples] = np.arange(len(samples))
    moved = new_row[edits.rows]
    chosen = np.flatnonzero(moved >= 0)
    if not chosen.size:
        return None
    return LogitEdits(
        rows=moved[chosen],
        token_ids=edits.token_ids[chosen],
        bias=edits.bias[chosen],
        divisor=edits.divisor[chosen],
        offset=edits.offset[chosen],
    )

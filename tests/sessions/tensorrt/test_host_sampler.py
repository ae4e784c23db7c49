"""The sampler on the host draws what the sampler's oracle draws, of those rows alone that need it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.logit_edits import BANNED, LogitEdits, edited_logits
from draftline.sampling import sample_reference
from draftline.sessions.protocol import StepBatch
from draftline.sessions.tensorrt.host_sampler import HostSampler
from tests.sessions.tiny_engines import Text, make_batch

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def sampler() -> HostSampler:
    return HostSampler(VOCAB_SIZE, 1)


class Rows:
    """Logits that remember who was asked for."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.logits = logits
        self.asked: list[int] = []

    def __call__(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        self.asked += rows.tolist()
        return self.logits[rows]


def batch_of(temperature: list[float]) -> StepBatch:
    batch = make_batch([Text([0])], [list(range(len(temperature)))])
    random = np.random.default_rng(2)
    return StepBatch(
        **{name: getattr(batch, name) for name in ("input_ids", "position_ids", "sequence_starts", "context_lengths")},
        block_table=batch.block_table,
        sample_rows=batch.sample_rows,
        temperature=np.array(temperature, np.float32),
        top_k=np.array([0, 5, 0, 20, 0, 0], np.int32)[: len(temperature)],
        top_p=np.array([1, 1, 0.7, 0.9, 1, 1], np.float32)[: len(temperature)],
        uniform=random.random(len(temperature), np.float32),
    )


def test_rows_are_drawn_as_the_oracle_draws_them(sampler: HostSampler) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (6, VOCAB_SIZE)).astype(np.float32)
    batch, rows = batch_of([0, 0.7, 1.3, 1, 0, 0]), Rows(logits)
    edits = LogitEdits(
        rows=np.array([1, 4], np.int32),
        token_ids=np.array([logits[1].argmax(), logits[4].argmax()], np.int32),
        bias=np.zeros(2, np.float32),
        divisor=np.ones(2, np.float32),
        offset=np.full(2, BANNED, np.float32),
    )
    drawn = sampler.draw(logits.argmax(axis=1), rows, batch, edits)
    assert rows.asked == [1, 2, 3, 4], "greedy rows without edits are the network's"
    edited = edited_logits(logits, edits)
    parameters = zip(batch.temperature, batch.top_k, batch.top_p, batch.uniform, strict=True)
    expected = [
        sample_reference(row, float(temperature), int(top_k), float(top_p), float(uniform))
        for row, (temperature, top_k, top_p, uniform) in zip(edited, parameters, strict=True)
    ]
    assert drawn.tolist() == expected


def test_broken_rows_draw_nothing(sampler: HostSampler) -> None:
    """A logit of -inf is no reason to end: the network says -1 of it, and its row is looked at."""
    logits = np.random.default_rng(1).normal(0, 3, (4, VOCAB_SIZE)).astype(np.float32)
    logits[0, 3], logits[1, 5], logits[2] = np.nan, -np.inf, -np.inf
    greedy = np.array([-1, -1, -1, logits[3].argmax()])
    rows = Rows(logits)
    drawn = sampler.draw(greedy, rows, batch_of([0, 0, 0, 0]))
    assert drawn.tolist() == [-1, int(logits[1].argmax()), -1, int(logits[3].argmax())]
    assert rows.asked == [0, 1, 2]

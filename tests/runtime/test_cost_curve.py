"""The cost curve: its shape, its corrections, and how it is measured."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.runtime.cost_curve import CostCurve, measure_cost_curve
from draftline.runtime.limits import EngineLimits
from draftline.sessions.protocol import StepBatch, StepResult
from tests.runtime.fake_session import FakeSession

ROWS = [1, 2, 4, 8, 16, 32, 64]
MEASURED = [35.0, 32.0, 33.0, 46.0, 62.0, 97.0, 163.0]


class TimedSession:
    """Takes ``milliseconds(rows)``; checks that nothing is committed."""

    key_chunk, num_blocks = 0, 1

    def __init__(self, milliseconds: float) -> None:
        self.sizes: list[int] = []
        self.token_ids: list[list[int]] = []
        self.num_sampled: list[int] = []
        self._milliseconds = milliseconds

    def forward(self, batch: StepBatch) -> StepResult:
        self.sizes.append(batch.input_ids.size)
        self.token_ids.append(batch.input_ids.tolist())
        self.num_sampled.append(batch.sample_rows.size)
        time.sleep(self._milliseconds * batch.input_ids.size / 1000)
        return StepResult(np.zeros(batch.sample_rows.size, np.int32))

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        raise AssertionError("a probe commits nothing")

    def close(self) -> None:
        pass


def limits(max_num_tokens: int) -> EngineLimits:
    return EngineLimits(max_batch_size=1, max_seq_len=128, max_num_tokens=max_num_tokens, block_size=8, max_blocks=32)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=7), st.lists(st.floats(1, 300), max_size=20))
def test_never_decreases_and_is_never_free(milliseconds: list[float], steps: list[float]) -> None:
    curve = CostCurve(ROWS[: len(milliseconds)], milliseconds)
    for number, step in enumerate(steps):
        curve.observe(1 + 7 * number, step)
    values = curve.at(np.arange(1, 200))
    assert bool(np.all(values > 0))
    assert bool(np.all(np.diff(values) >= -1e-9))


def test_goes_on_behind_the_last_knot_at_no_less_than_its_mean_slope() -> None:
    assert CostCurve([1, 2, 4], [10.0, 11.0, 19.0]).at(8) == pytest.approx(35.0)
    flat = CostCurve([1, 32, 64], [10.0, 73.0, 73.0])
    assert flat.at(64 + 63) == pytest.approx(73.0 + 63.0)


def test_follows_a_load_that_slows_everything() -> None:
    curve = CostCurve(ROWS, MEASURED)
    before = curve.at([1, 8, 32])
    for number in range(60):
        rows = (1, 8, 32)[number % 3]
        curve.observe(rows, 3.0 * float(before[number % 3]))
    assert curve.at([1, 8, 32]) == pytest.approx(3.0 * before, rel=0.1)
    assert float(curve.at(64)) > 2.0 * MEASURED[-1]  # never run meanwhile


def test_follows_a_shape_that_the_probe_got_wrong() -> None:
    curve = CostCurve(ROWS, MEASURED)
    for _ in range(40):
        curve.observe(1, 33.0)
        curve.observe(16, 124.0)
    assert curve.at([1, 16]) == pytest.approx([33.0, 124.0], rel=0.05)


def test_one_outlier_is_not_believed() -> None:
    curve = CostCurve(ROWS, MEASURED)
    before = curve.at(ROWS)
    curve.observe(8, 10_000.0)
    assert float(np.max(curve.at(ROWS) / before)) < 1.4


def test_measures_all_sizes_that_fit_with_every_row_sampled() -> None:
    session = TimedSession(0.1)
    curve = measure_cost_curve(session, limits(max_num_tokens=20))
    assert sorted(set(session.sizes)) == curve.num_tokens.tolist() == [1, 2, 4, 8, 16]
    assert session.num_sampled == session.sizes
    assert curve.at([1, 16]).tolist() >= [0.1, 1.6]


def test_rows_of_a_probe_are_tokens_from_all_over_the_vocabulary() -> None:
    """Rows of one token choose the same experts, and cost less than those of a text."""
    session = TimedSession(0.0)
    measure_cost_curve(session, replace(limits(max_num_tokens=8), vocab_size=320))
    assert session.token_ids[-1] == [0, 40, 80, 120, 160, 200, 240, 280]
    measure_cost_curve(session, replace(limits(max_num_tokens=8), vocab_size=3))
    assert session.token_ids[-1] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_slow_engines_are_not_probed_with_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftline.runtime.cost_curve._SLOW_FORWARD_MS", 1.0)
    session = TimedSession(0.5)
    assert measure_cost_curve(session, limits(max_num_tokens=64)).num_tokens.tolist() == [1, 2, 4]


def test_a_probe_keeps_the_contract_of_a_session() -> None:
    session = FakeSession(num_blocks=4, block_size=8, vocab_size=11, max_num_tokens=16)
    measure_cost_curve(session, limits(max_num_tokens=16))
    assert session.num_forwards == 5 * 4

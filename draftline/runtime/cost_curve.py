"""What a forward of the target costs, by its number of rows: measured once, then corrected by the steps themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftline.runtime.isotonic import fit_isotonic
from draftline.runtime.limits import EngineLimits
from draftline.sessions.protocol import Session, StepBatch

_PROBED_TOKENS = (1, 2, 4, 8, 16, 32, 64)
_NUM_REPEATS = 3
_SLOW_FORWARD_MS = 250.0  # no more rows are probed once a forward takes so long: a server must start in seconds
_GLOBAL_RATE = 0.1  # share of a step's surprise, in log, that goes to the whole curve
_LOCAL_RATE = 0.15  # and to the knots around the step's number of rows; more at first, as those are hardly known
_PROBED_WEIGHT = 3.0  # of the probe of a knot, in observed steps
_MAX_SURPRISE = 2.0  # a step that took longer than so many times what was expected counts as one that took so many


class CostCurve:
    """Milliseconds of a forward, piecewise linear in its rows and never decreasing.

    ``observe`` follows what steps really take. A correction has a part for the whole curve (another load of the
    machine, longer contexts) and one for each knot (a shape that the probe got wrong), so that numbers of rows that are
    not in use now keep their relation to those that are.

    Shapes: ``num_tokens [K]`` increasing, ``milliseconds [K]`` positive, K >= 1. Behind the last knot the curve goes on
    with the slope of its last segment, or the mean slope where that is steeper: noise must not make rows free.

    >>> curve = CostCurve([1, 2, 4], [10.0, 10.0, 14.0])
    >>> curve.at([1, 3, 6]).tolist()
    [10.0, 12.0, 18.0]
    """

    def __init__(self, num_tokens: Sequence[int], milliseconds: Sequence[float]) -> None:
        self._knots = np.asarray(num_tokens, dtype=np.float64)
        self._measured = fit_isotonic(np.asarray(milliseconds, dtype=np.float64), np.ones(len(milliseconds)))
        assert self._knots.shape == self._measured.shape
        assert bool(np.all(np.diff(self._knots) > 0))
        assert bool(np.all(self._measured > 0))
        self._corrections = np.zeros(self._knots.size)  # log of the local part of the correction
        self._num_observed = np.zeros(self._knots.size)
        self._scale = 0.0  # log of the part for the whole curve
        self._refit()

    @property
    def num_tokens(self) -> NDArray[np.float64]:
        return self._knots

    @property
    def milliseconds(self) -> NDArray[np.float64]:
        """The corrected curve at its knots, ``[K]``."""
        return self._values

    def at(self, num_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the milliseconds of forwards of so many rows, of the shape of ``num_tokens``."""
        rows = np.asarray(num_tokens, dtype=np.float64)
        inside = np.interp(rows, self._knots, self._values)
        return np.asarray(inside + np.maximum(rows - self._knots[-1], 0.0) * self._slope, dtype=np.float64)

    def observe(self, num_tokens: int, milliseconds: float) -> None:
        """Correct the curve by a forward of ``num_tokens`` rows that took ``milliseconds``."""
        if num_tokens < 1 or milliseconds <= 0.0:
            return
        surprise = min(max(milliseconds / float(self.at(num_tokens)), 1 / _MAX_SURPRISE), _MAX_SURPRISE)
        step = float(np.log(surprise))
        place = float(np.interp(num_tokens, self._knots, np.arange(self._knots.size)))
        self._scale += _GLOBAL_RATE * step
        nearness = np.maximum(1.0 - np.abs(np.arange(self._knots.size) - place) / 2, 0.0)
        self._corrections += np.maximum(_LOCAL_RATE, 1 / (_PROBED_WEIGHT + self._num_observed)) * step * nearness
        self._num_observed += nearness
        self._refit()

    def _refit(self) -> None:
        corrected = self._measured * np.exp(self._scale + self._corrections)
        self._values = fit_isotonic(corrected, np.ones(corrected.size))
        self._slope = 0.0
        if self._knots.size > 1:
            rises, runs = np.diff(self._values), np.diff(self._knots)
            self._slope = float(max(rises[-1] / runs[-1], rises.sum() / runs.sum()))


def measure_cost_curve(session: Session, limits: EngineLimits) -> CostCurve:
    """Time greedy forwards of 1, 2, 4, ... 64 rows, all of them sampled, as every node of a tree is.

    Each is one causal sequence without a context, the cheapest probe that reads all the weights; nothing is committed.
    Its tokens are spread over the vocabulary: rows of one token would go through the same experts of a mixture.
    One forward per size warms up, the fastest of the next three counts.
    """
    num_tokens: list[int] = []
    milliseconds: list[float] = []
    for size in _PROBED_TOKENS:
        if size > min(limits.max_num_tokens, limits.max_seq_len):
            break
        batch = _chain_batch(size, limits.vocab_size or 1)
        session.forward(batch)
        seconds = []
        for _ in range(_NUM_REPEATS):
            started = time.perf_counter()
            session.forward(batch)
            seconds.append(time.perf_counter() - started)
        num_tokens.append(size)
        milliseconds.append(min(seconds) * 1000)
        if milliseconds[-1] > _SLOW_FORWARD_MS and len(num_tokens) > 2:
            break
    return CostCurve(num_tokens, milliseconds)


def _chain_batch(num_rows: int, vocab_size: int) -> StepBatch:
    rows = np.arange(num_rows, dtype=np.int32)
    return StepBatch(
        input_ids=(np.arange(num_rows) * vocab_size // num_rows).astype(np.int32),
        position_ids=rows,
        sequence_starts=np.array([0, num_rows], np.int32),
        context_lengths=np.zeros(1, np.int32),
        block_table=np.full((1, 1), -1, np.int32),
        sample_rows=rows,
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        uniform=np.zeros(num_rows, np.float32),
    )

"""What the runtime adds to a step: its wall time without what passes inside the sessions."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.core import EngineCore
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.drafters.building import DrafterSetup, Speculation
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.sessions.protocol import DraftBatch, DraftResult, Session, StepBatch, StepResult
from draftline.speculation import TreeShape
from draftline.tree_growth import needed_candidates

_TARGET_MS, _HEAD_MS = 10.0, 0.3  # of a forward that reads weights: speculation pays, and caches are cold behind it
_NUM_WEIGHTS, _CHUNK = 2**24, 2**16  # 64 MB, more than caches hold; read in pieces of 0.25 MB
_VOCAB_SIZE = 32000
_PROMPT_TOKENS = 64
_HIT_WEIGHTS = (0.6, 0.2, 0.1, 0.05)  # how often the target's token is the drafter's first, second, ... candidate


class Stopwatch:
    """Seconds spent inside sessions, which return at once or read weights first, as an engine does."""

    def __init__(self, *, reads_weights: bool) -> None:
        self.seconds = 0.0
        self._weights = np.ones(_NUM_WEIGHTS if reads_weights else 0, dtype=np.float32)
        self._place = 0

    def read_weights(self, started: float, milliseconds: float) -> None:
        """Count what passed since ``started``, which is at least so much where sessions read weights."""
        while self._weights.size and (time.perf_counter() - started) * 1000 < milliseconds:
            self._weights[self._place : self._place + _CHUNK].sum()
            self._place = (self._place + _CHUNK) % _NUM_WEIGHTS
        self.seconds += time.perf_counter() - started


class StandInTarget:
    """Draws a token that depends on the row's own token alone; there is no engine."""

    key_chunk = 0

    def __init__(self, stopwatch: Stopwatch, num_blocks: int) -> None:
        self._stopwatch, self.num_blocks = stopwatch, num_blocks

    def forward(self, batch: StepBatch) -> StepResult:
        started = time.perf_counter()
        result = StepResult(next_ids(batch.input_ids[batch.sample_rows]))
        self._stopwatch.read_weights(started, _TARGET_MS)
        return result

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        pass

    def close(self) -> None:
        pass


class StandInHead:
    """An EAGLE head whose candidates hold the target's token, first in ``_HIT_WEIGHTS[0]`` of the cases."""

    def __init__(self, stopwatch: Stopwatch, num_candidates: int) -> None:
        self._stopwatch = stopwatch
        weights = np.array([*_HIT_WEIGHTS, *[0.01] * num_candidates][:num_candidates])
        self._weights = weights / weights.sum()
        self._random = np.random.default_rng(0)

    def keep_features(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        pass

    def forward(self, batch: DraftBatch) -> DraftResult:
        started = time.perf_counter()
        num_rows, num_candidates = batch.candidate_rows.size, self._weights.size
        place = self._random.choice(num_candidates, num_rows, p=self._weights)
        offsets = (np.arange(num_candidates) - place[:, None]) % num_candidates
        token_ids = (next_ids(batch.input_ids[batch.candidate_rows])[:, None] + offsets) % _VOCAB_SIZE
        log_probs = np.broadcast_to(np.log(self._weights).astype(np.float32), token_ids.shape)
        result = DraftResult(token_ids.astype(np.int32), log_probs)
        self._stopwatch.read_weights(started, _HEAD_MS)
        return result

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        pass

    def close(self) -> None:
        pass


def next_ids(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The token that the stand-in for a target draws behind each token."""
    return ((token_ids.astype(np.int64) * 7919 + 104729) % _VOCAB_SIZE).astype(np.int32)


def measure_host_overhead(shape: TreeShape, *, batch_size: int, num_steps: int, reads_weights: bool) -> list[float]:
    """Return the milliseconds of host work in each of ``num_steps`` steps that decode ``batch_size`` sequences.

    The sessions are stand-ins, an EAGLE head's and its target's: all of the runtime runs, and no engine. Where they
    return at once, ``auto`` trees find that drafting does not pay.
    """
    max_seq_len = _PROMPT_TOKENS + (num_steps + 2) * (shape.max_depth + 1)
    limits = EngineLimits(
        max_batch_size=batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max(batch_size * shape.max_nodes, batch_size * _PROMPT_TOKENS),
        block_size=16,
        max_blocks=batch_size * (max_seq_len // 16 + 2),
    )
    stopwatch = Stopwatch(reads_weights=reads_weights)
    target: Session = StandInTarget(stopwatch, limits.max_blocks)
    source = DrafterSetup("eagle3", StandInHead(stopwatch, needed_candidates(shape)))
    policy = SpeculationPolicy(shape, CostCurve([1, 1024], [_TARGET_MS, _TARGET_MS]), 1)
    core = EngineCore(target, limits, prefix_cache=True, speculation=Speculation((source,), shape), policy=policy)
    for index in range(batch_size):
        prompt_ids = [(index * _PROMPT_TOKENS + place) % _VOCAB_SIZE for place in range(_PROMPT_TOKENS)]
        request = Request(f"host-{index}", prompt_ids, max_seq_len - _PROMPT_TOKENS, _ignore)
        core.add(Sequence(request, check_request(request, limits), time.time_ns()))
    core.step()  # the prompts
    core.step()  # the first trees
    milliseconds = []
    for _ in range(num_steps):
        inside, started = stopwatch.seconds, time.perf_counter()
        core.step()
        wall = time.perf_counter() - started
        milliseconds.append((wall - (stopwatch.seconds - inside)) * 1000)
    return milliseconds


def _ignore(output: Output) -> None:
    pass

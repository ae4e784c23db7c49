"""One step of the engine, without threads: schedule, forward, commit, emit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from draftline.runtime.limits import EngineLimits
from draftline.runtime.request import FinishReason, Output
from draftline.runtime.scheduler import Scheduler
from draftline.runtime.sequence import Sequence
from draftline.sessions.protocol import Session

# What a session raises when a forward fails (DraftlineError is a ValueError). Nothing was committed then, so only the
# running requests are lost. Anything else is a bug, and stops the engine.
_FORWARD_ERRORS = (RuntimeError, ValueError, MemoryError, OSError)

Emission = tuple[Sequence, Output]


@dataclass(frozen=True)
class Statistics:
    """Gauges and counters of one engine.

    ``num_blocks_cached`` of the free blocks are ones the prefix cache can find. ``num_cached_tokens`` counts the tokens
    whose KV it spared, of prompts and of sequences that return after a preemption.
    """

    num_requests_active: int
    num_requests_running: int
    num_requests_waiting: int
    num_requests_finished: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_used: int
    num_blocks_cached: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int


class EngineCore:
    """Serve sequences step by step; one thread owns it. What is emitted is returned, never called back."""

    def __init__(self, session: Session, limits: EngineLimits, *, prefix_cache: bool) -> None:
        self.session = session
        self.scheduler = Scheduler(limits, prefix_cache=prefix_cache)
        self._all_rows = np.arange(limits.max_num_tokens, dtype=np.int64)
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_requests_finished = 0
        self.num_prompt_tokens = 0
        self._sequences: dict[str, Sequence] = {}

    @property
    def is_idle(self) -> bool:
        return not self._sequences

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence made of a checked request."""
        assert sequence.request.request_id not in self._sequences
        self._sequences[sequence.request.request_id] = sequence
        self.scheduler.add(sequence)
        self.num_prompt_tokens += sequence.num_prompt_tokens

    def cancel(self, request_id: str) -> list[Emission]:
        """End a request between steps; one that is not active (any more) is left alone."""
        sequence = self._sequences.get(request_id)
        return [] if sequence is None else self._end([sequence], "cancelled")

    def end_all(self, finish_reason: FinishReason, error: str | None = None) -> list[Emission]:
        """End every request, running and waiting."""
        return self._end(list(self._sequences.values()), finish_reason, error)

    def step(self) -> list[Emission]:
        """Run one step and return what it emitted; an idle engine does nothing.

        When the forward fails, nothing was committed by it, and every running request ends with its message.
        """
        scheduler = self.scheduler
        sequences = scheduler.schedule()
        if not sequences:
            return []
        batch, slot_mapping = scheduler.builder.build(sequences)
        rows = self._all_rows[: slot_mapping.size]
        try:
            result = self.session.forward(batch)
            self.session.commit(rows, slot_mapping)
        except _FORWARD_ERRORS as error:
            return self._end(list(scheduler.running), "error", f"forward: {error}")
        self.num_steps += 1
        sampled = [sequence for sequence in sequences if sequence.is_sampled]
        scheduler.commit(sequences)
        emissions = []
        for sequence, token_id in zip(sampled, result.sampled_ids.tolist(), strict=True):
            output = sequence.extend((token_id,))
            self.num_generated_tokens += len(output.token_ids)
            emissions.append((sequence, output))
            if sequence.is_finished:
                self._forget(sequence)
        return emissions

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks were lost or are in two hands."""
        self.scheduler.check_integrity()

    def statistics(self) -> Statistics:
        pool = self.scheduler.pool
        return Statistics(
            num_requests_active=len(self._sequences),
            num_requests_running=len(self.scheduler.running),
            num_requests_waiting=len(self.scheduler.waiting),
            num_requests_finished=self.num_requests_finished,
            num_blocks_total=pool.num_blocks,
            num_blocks_free=pool.num_free_blocks,
            num_blocks_used=pool.num_used_blocks,
            num_blocks_cached=pool.num_cached_blocks,
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _end(
        self, sequences: Iterable[Sequence], finish_reason: FinishReason, error: str | None = None
    ) -> list[Emission]:
        emissions = [(sequence, sequence.end(finish_reason, error)) for sequence in sequences]
        for sequence, _ in emissions:
            self._forget(sequence)
        return emissions

    def _forget(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        self.num_requests_finished += 1

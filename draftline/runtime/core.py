"""One step of the engine, without threads: schedule, draft, verify, accept, commit, fill, emit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from draftline.acceptance import Accepted, accept_exact, accept_typical, acceptable_nodes
from draftline.draft_trees import DraftTrees
from draftline.errors import RequestError
from draftline.logit_edits import edited_logits
from draftline.runtime.drafters.building import PLAIN, Speculation, build_drafters
from draftline.runtime.drafters.drafter import VerifiedStep
from draftline.runtime.drafting import Drafting
from draftline.runtime.limits import EngineLimits
from draftline.runtime.request import FinishReason, Output
from draftline.runtime.scheduler import Scheduler
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.runtime.speculation_numbers import SpeculationCounters, SpeculationNumbers
from draftline.runtime.step_builder import CommittedRows, Step
from draftline.sampling import log_probs_of
from draftline.sessions.protocol import Session, StepResult

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
    speculation: SpeculationNumbers


class EngineCore:
    """Serve sequences step by step; one thread owns it. What is emitted is returned, never called back."""

    def __init__(
        self,
        session: Session,
        limits: EngineLimits,
        *,
        prefix_cache: bool,
        speculation: Speculation = PLAIN,
        policy: SpeculationPolicy | None = None,
    ) -> None:
        self.session = session
        self.limits = limits
        self.scheduler = Scheduler(
            limits,
            prefix_cache=prefix_cache,
            lookahead=speculation.lookahead,
            drafters_keep_kv=speculation.keeps_kv,
        )
        self._speculation = speculation
        drafters = build_drafters(speculation, self.scheduler.builder, limits)
        assert policy is not None or not drafters, "what drafts has a policy"
        self._drafting = Drafting(drafters, speculation.shape, policy, key_chunk=session.key_chunk)
        self.scheduler.watch_seats(self._drafting.join, self._drafting.leave)
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_requests_finished = 0
        self.num_prompt_tokens = 0
        self._numbers = SpeculationCounters()
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

        When a forward fails, every running request ends with its message; what was emitted before is kept. Where the
        logits of one hold no distribution, it ends alone, behind the tokens that were accepted before.
        """
        if self.is_idle:
            return []
        emissions: list[Emission] = []
        try:
            self._run_step(emissions)
        except _FORWARD_ERRORS as error:
            emissions += self._end(list(self.scheduler.running), "error", f"forward: {error}")
        return emissions

    def _run_step(self, emissions: list[Emission]) -> None:
        scheduler, drafting, started = self.scheduler, self._drafting, time.perf_counter()
        decoding = scheduler.schedule_decode()
        num_other_rows = self.limits.max_num_tokens // 2 if scheduler.has_prefill else 0
        trees, num_drafted = drafting.draft(
            decoding,
            num_other_rows=num_other_rows,
            max_rows=self.limits.max_num_tokens - num_other_rows,
            cover_drafts=scheduler.cover_drafts,
        )
        scheduler.publish(drafting.num_filled)
        prefilling = scheduler.schedule_prefill(self.limits.max_num_tokens - int(trees.num_nodes.sum()))
        assert decoding or prefilling, "the oldest sequence always makes progress"
        step = self._build(decoding, trees, prefilling)
        self._count_forwards(step.decoding, drafting.take_num_forwards())
        drafted = time.perf_counter()
        result = self.session.forward(step.batch)
        verified = time.perf_counter()
        accepted = self._accept(step, result)
        rows = scheduler.builder.committed_rows(step, accepted)
        is_drawn = _is_drawn(rows, result)
        verified_step = _verified_step(step, rows, result, is_drawn)
        self.session.commit(verified_step.rows.rows, verified_step.rows.slots)
        self.num_steps += 1
        for sequence in step.sequences:
            sequence.speculation.add_target_forward()
        self._numbers.add_target_forward()

        emissions += self._emit(step, accepted, rows, result, num_drafted)
        self._count_committed(step, accepted, is_drawn)
        filling = time.perf_counter()
        try:
            self._fill(verified_step)
            scheduler.publish(drafting.num_filled)
        finally:
            for sequence in [sequence for sequence in step.sequences if sequence.is_finished]:
                self._forget(sequence)
        ended = time.perf_counter()
        drafting.observe_times(
            trees,
            accepted,
            draft_ms=(drafted - started + ended - filling) * 1e3,
            verify_ms=(verified - drafted) * 1e3,
            num_rows=len(step.batch.input_ids),
        )

    def _build(self, decoding: list[Sequence], trees: DraftTrees, prefilling: list[Sequence]) -> Step:
        wants_logits = self._speculation.acceptance.rule == "typical" or any(
            sequence.request.return_log_probs or sequence.request.return_logits for sequence in (*decoding, *prefilling)
        )
        return self.scheduler.builder.build(decoding, trees, prefilling, wants_logits=wants_logits)

    def _accept(self, step: Step, result: StepResult) -> Accepted:
        trees, sampled_ids = step.trees, step.by_node(result.sampled_ids)
        acceptance = self._speculation.acceptance
        if acceptance.rule == "exact" or not step.decoding:
            return accept_exact(trees, sampled_ids)
        assert result.logits is not None
        logits = edited_logits(result.logits, step.batch.edits)
        temperature = self.scheduler.builder.temperatures(step.seats[: len(step.decoding)])
        return accept_typical(trees, sampled_ids, acceptable_nodes(trees, logits, sampled_ids, temperature, acceptance))

    def _emit(
        self,
        step: Step,
        accepted: Accepted,
        rows: CommittedRows,
        result: StepResult,
        num_drafted: NDArray[np.int64],
    ) -> list[Emission]:
        """Extend every sequence by what was drawn for it; end those for which nothing could be."""
        emissions = []
        paths = accepted.paths
        path_ids = step.trees.token_ids[np.arange(len(paths))[:, None], paths].tolist()
        counts, bonus_ids = accepted.num_accepted_tokens.tolist(), accepted.bonus_ids.tolist()
        verified, drafted = (step.trees.num_nodes - 1).tolist(), num_drafted.tolist()
        for index, (sequence, count) in enumerate(zip(step.decoding, counts, strict=True)):
            sequence.speculation.add_step(drafted[index], verified[index], count)
            self._numbers.add_step(drafted[index], verified[index], count)
            # Nothing is accepted after a row that drew nothing, so only the last id can be -1.
            new_ids = [token_id for token_id in (*path_ids[index][1 : count + 1], bonus_ids[index]) if token_id >= 0]
            if not new_ids:
                emissions.append((sequence, sequence.end("error", _no_distribution(sequence))))
                continue
            output = sequence.extend(new_ids, count)
            if result.logits is not None:
                first = int(step.batch.sequence_starts[index])
                output = _with_logits(output, sequence, result, first + paths[index, : count + 1].astype(np.int64))
            self._numbers.add_emitted(len(output.token_ids))
            emissions.append((sequence, output))
            if bonus_ids[index] < 0 and not sequence.is_finished:
                emissions.append((sequence, sequence.end("error", _no_distribution(sequence))))
        for sequence, row in zip(step.prefilling, rows.sample_rows[len(paths) :].tolist(), strict=True):
            if row < 0:
                continue
            if result.sampled_ids[row] < 0:
                emissions.append((sequence, sequence.end("error", _no_distribution(sequence))))
                continue
            output = sequence.extend((int(result.sampled_ids[row]),))
            emissions.append((sequence, _with_logits(output, sequence, result, np.array([row]))))
        self.num_generated_tokens += sum(len(output.token_ids) for _, output in emissions)
        return emissions

    def _count_committed(self, step: Step, accepted: Accepted, is_drawn: NDArray[np.bool_]) -> None:
        counts = [*(accepted.num_accepted_tokens + 1).tolist(), *(s.num_scheduled for s in step.prefilling)]
        for sequence, count, drawn in zip(step.sequences, counts, is_drawn.tolist(), strict=True):
            if not drawn:
                continue
            # An answer that ended inside an accepted run has fewer tokens than were committed.
            sequence.num_committed = min(sequence.num_committed + count, sequence.num_tokens)
            sequence.num_scheduled = 0

    def _fill(self, step: VerifiedStep) -> None:
        """Let the drafters take in what was committed."""
        drafting = self._drafting
        drafting.observe(step)
        self._count_forwards(step.sequences, drafting.take_num_forwards())

    def _count_forwards(self, sequences: list[Sequence], num_draft_forwards: int) -> None:
        if not num_draft_forwards:
            return
        self._numbers.add_draft_forward(num_draft_forwards)
        for sequence in sequences:
            if sequence.max_draft_tokens:
                sequence.speculation.add_draft_forward(num_draft_forwards)

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
            speculation=self._numbers.numbers(),
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


def _is_drawn(rows: CommittedRows, result: StepResult) -> NDArray[np.bool_]:
    """Tell of each sequence whether its newest token, if one was to be drawn, could be: ``[B] bool``."""
    is_drawn = np.ones(len(rows.sample_rows), dtype=np.bool_)
    if result.sampled_ids.min(initial=0) < 0:
        sampled = rows.sample_rows >= 0
        is_drawn[sampled] = result.sampled_ids[rows.sample_rows[sampled]] >= 0
    return is_drawn


def _verified_step(step: Step, rows: CommittedRows, result: StepResult, is_drawn: NDArray[np.bool_]) -> VerifiedStep:
    """Leave out who drew nothing: their keys and values are no numbers, and the blocks will be others'."""
    if is_drawn.all():
        return VerifiedStep(step.sequences, step.seats, rows, result)
    sequences = [sequence for sequence, drawn in zip(step.sequences, is_drawn.tolist(), strict=True) if drawn]
    return VerifiedStep(sequences, step.seats[is_drawn], rows.of(is_drawn), result)


def _no_distribution(sequence: Sequence) -> str:
    rule = "logits are finite or -inf, one of a row finite"
    got = f"a row with NaN, inf or no finite one after {sequence.num_tokens} tokens"
    return str(RequestError("forward", rule, got, "check the weights, and their activations for overflow"))


def _with_logits(output: Output, sequence: Sequence, result: StepResult, sample_rows: NDArray[np.int64]) -> Output:
    """Add what the request asked for about each emitted token; ``sample_rows`` drew them, and maybe some more."""
    request = sequence.request
    if result.logits is None or not (request.return_log_probs or request.return_logits):
        return output
    logits = result.logits[sample_rows[: len(output.token_ids)]]
    token_ids = np.array(output.token_ids, dtype=np.int64)
    return replace(
        output,
        log_probs=tuple(log_probs_of(logits, token_ids).tolist()) if request.return_log_probs else None,
        logits=logits if request.return_logits else None,
    )

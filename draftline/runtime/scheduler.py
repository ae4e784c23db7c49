"""Who runs in the next step, and on which blocks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from draftline.block_pool import UNDRAFTED_ROOT_BLOCK, BlockPool
from draftline.runtime.limits import EngineLimits
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import StepBuilder


class Scheduler:
    """First come, first served; decode before prefill; the youngest gives way.

    Invariant: every running sequence arrived before every waiting one, and both are in order of arrival. Admission
    takes the head of the waiting ones, preemption the tail of the running ones, so the oldest always makes progress.
    """

    def __init__(
        self, limits: EngineLimits, *, prefix_cache: bool, lookahead: int = 0, drafters_keep_kv: bool = False
    ) -> None:
        """``lookahead``: tokens behind a block that the drafters' KV in it depends on (see ``BlockPool``)."""
        self.limits = limits
        self.pool = BlockPool(limits.max_blocks, limits.block_size, prefix_cache=prefix_cache, lookahead=lookahead)
        self._drafters_keep_kv = drafters_keep_kv
        self.builder = StepBuilder(limits)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._on_join: Callable[[Sequence], None] = _ignore
        self._on_leave: Callable[[Sequence], None] = _ignore
        self._blocked_at_release = -1  # pool.num_releases when the head of the waiting ones last failed to fit

    def add(self, sequence: Sequence) -> None:
        if self._drafters_keep_kv and sequence.max_draft_tokens == 0:
            sequence.cache_root = UNDRAFTED_ROOT_BLOCK
        self.waiting.append(sequence)

    @property
    def has_prefill(self) -> bool:
        """Whether some prompt is in the middle, or waits and may find a seat and blocks."""
        return self._may_admit or bool(self.running and self.running[-1].num_pending > 1)

    def schedule_decode(self) -> list[Sequence]:
        """Schedule the root of every sequence that decodes; a slot is found for each, if need be by preemption."""
        scheduled: list[Sequence] = []
        index = 0
        while index < len(self.running):  # a preemption shortens the list, at its tail
            sequence = self.running[index]
            assert sequence.num_pending == 1 or sequence is self.running[-1]
            if sequence.num_pending == 1 and self._cover_next_token(sequence):
                sequence.num_scheduled = 1
                scheduled.append(sequence)
            index += 1
        return scheduled

    def cover_drafts(self, decoding: list[Sequence], num_draft_tokens: list[int]) -> list[int]:
        """Give decoding sequences slots for drafts behind their roots, from free blocks alone; return for how many."""
        block_size, covered = self.limits.block_size, []
        for sequence, wanted in zip(decoding, num_draft_tokens, strict=True):
            num_slots = len(sequence.block_ids) * block_size - sequence.num_committed - 1
            if num_slots < wanted:
                num_blocks = min(-(-(wanted - num_slots) // block_size), self.pool.num_free_blocks)
                self._allocate(sequence, num_blocks)
                num_slots += num_blocks * block_size
            covered.append(min(wanted, num_slots))
        return covered

    def schedule_prefill(self, budget: int) -> list[Sequence]:
        """Schedule at most ``budget`` prompt tokens: of the prompt begun before, then of new ones while they fit.

        The next prompt is begun when the one before is done, so only the youngest sequence can be in the middle of one.
        """
        scheduled: list[Sequence] = []
        if budget > 0 and self.running and self.running[-1].num_pending > 1:
            budget -= self._schedule_prefill(self.running[-1], budget, scheduled)
        while budget > 0 and self._admit_next():
            budget -= self._schedule_prefill(self.running[-1], budget, scheduled)
        return scheduled

    def watch_seats(self, on_join: Callable[[Sequence], None], on_leave: Callable[[Sequence], None]) -> None:
        """Call ``on_join`` with who was given a seat and cached blocks, ``on_leave`` with who is about to lose both."""
        self._on_join, self._on_leave = on_join, on_leave

    def publish(self, num_filled: Callable[[Sequence], int]) -> None:
        """Make the full blocks of running sequences findable, up to ``num_filled`` tokens, which all pools hold."""
        block_size, lookahead = self.limits.block_size, self.pool.lookahead
        for sequence in self.running:
            if sequence.num_committed < (sequence.num_published_blocks + 1) * block_size:
                continue
            num_publishable = min(num_filled(sequence), sequence.num_committed, sequence.num_tokens - lookahead)
            while (sequence.num_published_blocks + 1) * block_size <= num_publishable:
                index = sequence.num_published_blocks
                block_id = sequence.block_ids[index]
                parent = sequence.block_ids[index - 1] if index else sequence.cache_root
                token_ids = sequence.token_ids[index * block_size : (index + 1) * block_size + lookahead]
                canonical = self.pool.publish(block_id, parent, token_ids)
                if canonical != block_id:
                    self.builder.replace_block(sequence, index, canonical)
                sequence.num_published_blocks += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, running or waiting, and release its blocks."""
        if sequence.seat >= 0:
            self.running.remove(sequence)
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
            self._blocked_at_release = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + used == total and no block is in two tables that do not share it."""
        self.pool.check_integrity([sequence.block_ids for sequence in self.running])

    def _cover_next_token(self, sequence: Sequence) -> bool:
        """Give the sequence a slot for its next token; False when it had to give way itself."""
        if sequence.num_committed < len(sequence.block_ids) * self.limits.block_size:
            return True
        while self.pool.num_free_blocks == 0:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._allocate(sequence, 1)
        return True

    def _schedule_prefill(self, sequence: Sequence, budget: int, scheduled: list[Sequence]) -> int:
        sequence.num_scheduled = min(sequence.num_pending, budget)
        scheduled.append(sequence)
        return sequence.num_scheduled

    @property
    def _may_admit(self) -> bool:
        """Whether somebody waits, and has a seat, and did not fail to fit since blocks were last released."""
        has_seat = bool(self.waiting) and len(self.running) < self.limits.max_batch_size
        return has_seat and self._blocked_at_release != self.pool.num_releases

    def _admit_next(self) -> bool:
        """Let the head of the waiting ones run if all its tokens fit, beside one more block for each running one."""
        if not self._may_admit:
            return False
        sequence, block_size = self.waiting[0], self.limits.block_size
        # The last token is always computed again: its row is the one the next token is drawn from.
        token_ids = sequence.token_ids[: sequence.num_tokens]
        shared = self.pool.find_prefix(token_ids, (token_ids.size - 1) // block_size, sequence.cache_root)
        self.pool.acquire(shared)
        num_new_blocks = -(-sequence.num_tokens // block_size) - len(shared)
        if num_new_blocks + len(self.running) > self.pool.num_free_blocks:
            self.pool.release(shared)
            self._blocked_at_release = self.pool.num_releases
            return False
        self.waiting.popleft()
        self.running.append(sequence)
        self.builder.take_seat(sequence)
        self.builder.append_blocks(sequence, shared)
        self._allocate(sequence, num_new_blocks)
        sequence.num_committed = len(shared) * block_size
        sequence.num_published_blocks = len(shared)
        self._on_join(sequence)
        sequence.num_reused_blocks += len(shared)
        sequence.first_scheduled_time_ns = sequence.first_scheduled_time_ns or time.time_ns()
        self.num_cached_tokens += sequence.num_committed
        return True

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        self.builder.append_blocks(sequence, self.pool.allocate(num_blocks))
        sequence.num_allocated_blocks += num_blocks

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks of the youngest running sequence; it keeps its tokens and computes their KV again."""
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self._on_leave(sequence)
        self.pool.release(sequence.block_ids)
        self.builder.leave_seat(sequence)
        sequence.block_ids = []
        sequence.num_committed = sequence.num_scheduled = sequence.num_published_blocks = 0


def _ignore(sequence: Sequence) -> None:
    pass

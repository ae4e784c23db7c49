"""A request being served: its tokens, its blocks, and what it has emitted."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from draftline.block_pool import ROOT_BLOCK
from draftline.logit_rules import LogitRules
from draftline.runtime.request import FinishReason, Metrics, Output, Request
from draftline.runtime.speculation_numbers import SpeculationCounters


class Sequence:
    """The mutable state of one request; owned by the engine's thread.

    ``token_ids[:num_tokens]`` is the prompt and the answer so far. Of these, the KV of the first ``num_committed`` is
    in the pool, and ``num_scheduled`` more are in the step being run (the root of a tree counts, its drafts do not):

        0 ........ num_committed ........ + num_scheduled ........ num_tokens ........ prompt + max_tokens
          in pool                in step                  pending               not yet drawn

    ``num_pending`` 1 means decode, more means prefill (of a prompt, or again after a preemption). Full blocks are
    published below ``cache_root``.
    """

    __slots__ = (
        "arrival_time_ns",
        "block_ids",
        "cache_root",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "is_finished",
        "last_token_time_ns",
        "logit_rules",
        "max_draft_tokens",
        "num_allocated_blocks",
        "num_committed",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_reused_blocks",
        "num_scheduled",
        "num_tokens",
        "request",
        "seat",
        "speculation",
        "token_ids",
    )

    def __init__(self, request: Request, prompt_ids: NDArray[np.int32], arrival_time_ns: int) -> None:
        self.request = request
        self.num_prompt_tokens = self.num_tokens = prompt_ids.size
        self.token_ids = np.empty(prompt_ids.size + request.max_tokens, dtype=np.int32)
        self.token_ids[: prompt_ids.size] = prompt_ids
        self.num_committed = self.num_scheduled = self.num_published_blocks = 0
        self.block_ids: list[int] = []
        self.cache_root = ROOT_BLOCK
        self.seat = -1
        self.is_finished = False
        self.max_draft_tokens = _max_draft_tokens(request)
        self.logit_rules = _logit_rules(request, prompt_ids)
        self.speculation = SpeculationCounters()
        self.num_allocated_blocks = self.num_reused_blocks = 0
        self.arrival_time_ns = arrival_time_ns
        self.first_scheduled_time_ns = self.first_token_time_ns = self.last_token_time_ns = 0

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_committed

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the step being run reaches the last token, so that the next one is drawn."""
        return self.num_committed + self.num_scheduled == self.num_tokens

    def extend(self, sampled_ids: Many[int], num_accepted_tokens: int | None = None) -> Output:
        """Append the tokens a step drew, up to the first reason to finish, and return what they emit.

        The first ``num_accepted_tokens`` of them were drafted (None: the step ended a prompt). The end id is neither
        kept nor emitted. The token that completes a stop word is kept; the text ends before the word. Tokens after the
        finishing one are dropped.
        """
        request, stream = self.request, self.request.text_stream
        num_left = request.max_tokens - self.num_output_tokens
        token_ids = tuple(sampled_ids[:num_left])
        finish_reason: FinishReason | None = "max_tokens" if len(token_ids) == num_left else None
        end_id = None
        if not request.end_ids.isdisjoint(token_ids):
            kept_ids = tuple(takewhile(lambda token_id: token_id not in request.end_ids, token_ids))
            token_ids, end_id = kept_ids, token_ids[len(kept_ids)]
            finish_reason = "end_id"
        pieces: list[str] = []
        if stream is not None:
            for token_id in token_ids:
                pieces.append(stream.push((token_id,)))
                if stream.stopped:
                    finish_reason, end_id = "stop_words", None
                    break
            token_ids = token_ids[: len(pieces)]
        num_new, first = len(token_ids), self.num_tokens
        self.num_tokens += num_new
        self.token_ids[first : self.num_tokens] = token_ids
        if self.logit_rules is not None:
            self.logit_rules.append(token_ids)
        if num_accepted_tokens is not None:
            self.speculation.add_emitted(num_new)
        if num_new:
            self.last_token_time_ns = time.time_ns()
            self.first_token_time_ns = self.first_token_time_ns or self.last_token_time_ns
        text = None
        if stream is not None:
            held = "" if finish_reason is None else stream.finish()
            text = "".join([*pieces, held])
            if pieces:
                pieces[-1] += held
        return Output(
            request.request_id,
            token_ids,
            text,
            finish_reason,
            metrics=None if finish_reason is None else self._finish(),
            num_accepted_tokens=min(num_accepted_tokens or 0, num_new),
            pieces=None if stream is None else tuple(pieces),
            end_id=end_id,
        )

    def end(self, finish_reason: FinishReason, error: str | None = None) -> Output:
        """Finish without a further token; text that is held back is dropped."""
        text = None if self.request.text_stream is None else ""
        return Output(self.request.request_id, (), text, finish_reason, error, self._finish())

    def _finish(self) -> Metrics:
        self.is_finished = True
        return Metrics(
            num_input_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            arrival_time_ns=self.arrival_time_ns,
            first_scheduled_time_ns=self.first_scheduled_time_ns,
            first_token_time_ns=self.first_token_time_ns,
            last_token_time_ns=self.last_token_time_ns,
            kv_cache_alloc_total_blocks=self.num_allocated_blocks + self.num_reused_blocks,
            kv_cache_alloc_new_blocks=self.num_allocated_blocks,
            kv_cache_reused_blocks=self.num_reused_blocks,
            speculation=self.speculation.numbers(),
        )


def _logit_rules(request: Request, prompt_ids: NDArray[np.int32]) -> LogitRules | None:
    sampling = request.sampling
    rules = LogitRules(
        prompt_ids.tolist(),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=sampling.min_tokens,
        end_ids=request.end_ids,
        bad_words=sampling.bad_words,
        logit_bias=sampling.logit_bias,
    )
    return None if rules.is_neutral else rules


def _max_draft_tokens(request: Request) -> int:
    if not request.speculate:
        return 0
    return np.iinfo(np.int32).max if request.max_draft_tokens is None else request.max_draft_tokens

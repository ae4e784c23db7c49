"""A request and what comes back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.speculation_numbers import NO_SPECULATION, SpeculationNumbers
from draftline.runtime.text_stream import TextStream

FinishReason = Literal["end_id", "stop_words", "max_tokens", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParameters:
    """``temperature`` 0 = greedy; ``top_k`` 0 = off; ``top_p`` 1 = off; ``seed`` with the position fixes every draw.

    The rest changes logits before them, in every position by the tokens before it, prompt and answer: ``logit_bias``
    (token id, bias) is added first; ``repetition_penalty`` (1 = off) divides positive logits of tokens that occur
    before, and multiplies negative ones; ``presence_penalty`` and ``frequency_penalty`` (0 = off) are subtracted once,
    and per occurrence. ``min_tokens`` bans the end ids until the answer has so many tokens; a token that would complete
    one of ``bad_words`` (token ids each) is banned. Details, and what TensorRT-LLM does otherwise: ``LogitRules``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Metrics:
    """Times are ``time.time_ns()``; blocks are KV blocks of the target."""

    num_input_tokens: int
    num_output_tokens: int
    arrival_time_ns: int
    first_scheduled_time_ns: int
    first_token_time_ns: int
    last_token_time_ns: int
    kv_cache_alloc_total_blocks: int
    kv_cache_alloc_new_blocks: int
    kv_cache_reused_blocks: int
    speculation: SpeculationNumbers = NO_SPECULATION


@dataclass(frozen=True, slots=True)
class Output:
    """What one step emitted for a request. The last one has a ``finish_reason`` and ``metrics``.

    ``token_ids`` are new since the previous output and never hold the end id; they do hold the token that completes a
    stop word. ``text`` is the new text that is safe to show (None where the request has no ``TextStream``), cut before
    a stop word. ``error`` is set with finish reason ``error``.

    The first ``num_accepted_tokens`` of ``token_ids`` were drafted. ``pieces`` is ``text`` token by token (the last one
    with what was held back). ``log_probs`` and ``logits [len(token_ids), V] float32`` are the target's own, before any
    edit, where the request asked for them. ``end_id`` is the one that was drawn, with finish reason ``end_id``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: Metrics | None = None
    num_accepted_tokens: int = 0
    pieces: tuple[str, ...] | None = None
    log_probs: tuple[float, ...] | None = None
    logits: NDArray[np.float32] | None = None
    end_id: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to continue, by at most ``max_tokens`` tokens; it ends before the first of ``end_ids``.

    ``on_output`` is called in the engine's thread, once per step that emitted something; it must be quick and must not
    raise (that stops the engine). ``text_stream`` is used by this request alone. ``speculate`` False decodes plainly;
    ``max_draft_tokens`` caps the draft tokens of a step (None = the pipeline's tree). Neither changes the answer.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    on_output: Callable[[Output], None]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    end_ids: frozenset[int] = frozenset()
    text_stream: TextStream | None = None
    speculate: bool = True
    max_draft_tokens: int | None = None
    return_log_probs: bool = False
    return_logits: bool = False

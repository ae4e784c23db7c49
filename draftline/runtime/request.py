"""A request and what comes back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from draftline.runtime.text_stream import TextStream

FinishReason = Literal["end_id", "stop_words", "max_tokens", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParameters:
    """``temperature`` 0 = greedy; ``top_k`` 0 = off; ``top_p`` 1 = off; ``seed`` with the position fixes every draw."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


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


@dataclass(frozen=True)
class Output:
    """What one step emitted for a request. The last one has a ``finish_reason`` and ``metrics``.

    ``token_ids`` are new since the previous output and never hold the end id; they do hold the token that completes a
    stop word. ``text`` is the new text that is safe to show (None where the request has no ``TextStream``), cut before
    a stop word. ``error`` is set with finish reason ``error``.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    metrics: Metrics | None = None


@dataclass(frozen=True)
class Request:
    """One prompt to continue, by at most ``max_tokens`` tokens; it ends before the first of ``end_ids``.

    ``on_output`` is called in the engine's thread, once per step that emitted something; it must be quick and must not
    raise (that stops the engine). ``text_stream`` is used by this request alone.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    on_output: Callable[[Output], None]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    end_ids: frozenset[int] = frozenset()
    text_stream: TextStream | None = None

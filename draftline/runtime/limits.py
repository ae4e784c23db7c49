"""What an engine can hold, and the requests that therefore can never be served."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.errors import PipelineError, RequestError
from draftline.runtime.request import Request

_MIN_TEMPERATURE = 1e-4  # below it, logits / temperature loses its meaning in float32; greedy is spelled 0
# Bounds that keep every edited logit far from BANNED and finite in float32, also divided by the least temperature.
_MAX_REPETITION = 1e3
_MAX_PENALTY = 1e3
MAX_BIAS = 1e9


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of one engine; ``vocab_size`` None = token ids are not checked against the vocabulary."""

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    block_size: int
    max_blocks: int
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for field, block in _FIELDS.items():
            if getattr(self, field) < 1:
                raise PipelineError(f"{block}.{field}", "must be at least 1", getattr(self, field), "raise it")
        if self.max_num_tokens < self.max_batch_size:
            raise PipelineError(
                "engine.max_num_tokens",
                f"must hold one token of each of engine.max_batch_size = {self.max_batch_size} sequences",
                self.max_num_tokens,
                "raise it, or lower engine.max_batch_size",
            )

    @property
    def max_blocks_per_sequence(self) -> int:
        return min(self.max_blocks, -(-self.max_seq_len // self.block_size))


_FIELDS = {
    "max_batch_size": "engine",
    "max_seq_len": "engine",
    "max_num_tokens": "engine",
    "block_size": "kv_cache",
    "max_blocks": "kv_cache",
}


def check_request(request: Request, limits: EngineLimits) -> NDArray[np.int32]:
    """Check that a request can be served by an engine that has nothing else to do, and return its prompt ``[n] int32``.

    Raises: RequestError, naming the field, for an empty or too long prompt, a token id outside the vocabulary,
    ``max_tokens`` below 1 or beyond ``max_seq_len``, more blocks than the pool has, ``max_draft_tokens`` below 0,
    sampling parameters out of range.
    """
    prompt_ids = np.asarray(request.prompt_ids, dtype=np.int64)
    num_prompt_tokens = prompt_ids.size
    if num_prompt_tokens == 0:
        raise RequestError("prompt", "must hold at least one token", "an empty prompt", "send some text")
    if num_prompt_tokens > limits.max_seq_len - 1:
        raise RequestError(
            "prompt",
            f"must leave room for one token within engine.max_seq_len = {limits.max_seq_len}",
            f"{num_prompt_tokens} tokens",
            "shorten the prompt, or raise engine.max_seq_len",
        )
    end = np.iinfo(np.int32).max if limits.vocab_size is None else limits.vocab_size
    outside = prompt_ids[(prompt_ids < 0) | (prompt_ids >= end)]
    if outside.size:
        raise RequestError(
            "prompt", f"token ids lie in 0..{end - 1}", int(outside[0]), "encode it with the engine's own tokenizer"
        )
    if request.max_tokens < 1:
        raise RequestError("max_tokens", "must be at least 1", request.max_tokens, "ask for at least one token")
    if num_prompt_tokens + request.max_tokens > limits.max_seq_len:
        raise RequestError(
            "max_tokens",
            f"prompt and answer must fit in engine.max_seq_len = {limits.max_seq_len}",
            f"{num_prompt_tokens} prompt tokens + {request.max_tokens}",
            f"ask for at most {limits.max_seq_len - num_prompt_tokens}, or raise engine.max_seq_len",
        )
    # The last token of an answer is never fed back, so it needs no slot.
    num_blocks = -(-(num_prompt_tokens + request.max_tokens - 1) // limits.block_size)
    if num_blocks > limits.max_blocks:
        raise RequestError(
            "max_tokens",
            f"prompt and answer must fit in kv_cache.max_blocks = {limits.max_blocks} of {limits.block_size} tokens",
            f"{num_prompt_tokens} prompt tokens + {request.max_tokens}, {num_blocks} blocks",
            "ask for fewer tokens, or raise kv_cache.max_blocks",
        )
    if request.max_draft_tokens is not None and request.max_draft_tokens < 0:
        raise RequestError(
            "max_draft_tokens",
            "must be at least 0",
            request.max_draft_tokens,
            "use 0 for plain decoding, or leave it out for as many as the pipeline drafts",
        )
    _check_sampling(request)
    _check_logit_rules(request, end)
    return prompt_ids.astype(np.int32)


def _check_sampling(request: Request) -> None:
    sampling = request.sampling
    if not math.isfinite(sampling.temperature) or not (
        sampling.temperature == 0 or sampling.temperature >= _MIN_TEMPERATURE
    ):
        raise RequestError(
            "temperature",
            f"must be 0 (greedy) or at least {_MIN_TEMPERATURE}",
            sampling.temperature,
            "use 0 or e.g. 0.8",
        )
    if not 0 <= sampling.top_k <= np.iinfo(np.int32).max:
        raise RequestError("top_k", "must be 0 (off) or positive", sampling.top_k, "use 0 or e.g. 50")
    if not 0.0 < sampling.top_p <= 1.0:
        raise RequestError("top_p", "must be above 0 and at most 1 (off)", sampling.top_p, "use 1 or e.g. 0.95")
    if not 0 <= sampling.seed < 2**64:
        raise RequestError("seed", "must lie in 0..2**64 - 1", sampling.seed, "use an unsigned 64-bit integer")


def _check_logit_rules(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    repetition = sampling.repetition_penalty
    if not 1 / _MAX_REPETITION <= repetition <= _MAX_REPETITION:
        raise RequestError(
            "repetition_penalty",
            f"must lie in {1 / _MAX_REPETITION:g}..{_MAX_REPETITION:g}",
            repetition,
            "use 1 (off) or e.g. 1.1",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        penalty = getattr(sampling, name)
        if not abs(penalty) <= _MAX_PENALTY:
            rule = f"must lie in {-_MAX_PENALTY:g}..{_MAX_PENALTY:g}"
            raise RequestError(name, rule, penalty, "use 0 (off) or e.g. 0.5")
    if not 0 <= sampling.min_tokens <= request.max_tokens:
        raise RequestError(
            "min_tokens",
            f"must lie in 0..max_tokens = {request.max_tokens}",
            sampling.min_tokens,
            "use 0 (off) or fewer tokens than max_tokens",
        )
    if sampling.min_tokens:
        _check_token_ids("end_ids", sorted(request.end_ids), vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise RequestError("bad_words", "must hold at least one token each", "an empty word", "leave it out")
        _check_token_ids("bad_words", word, vocab_size)
    _check_token_ids("logit_bias", [token_id for token_id, _ in sampling.logit_bias], vocab_size)
    for token_id, bias in sampling.logit_bias:
        if not abs(bias) <= MAX_BIAS:
            raise RequestError(
                "logit_bias",
                f"must lie in {-MAX_BIAS:g}..{MAX_BIAS:g}",
                f"{bias} for token {token_id}",
                "use e.g. 5; to ban a token, make it a bad word",
            )


def _check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                where, f"token ids lie in 0..{vocab_size - 1}", token_id, "encode it with the engine's own tokenizer"
            )

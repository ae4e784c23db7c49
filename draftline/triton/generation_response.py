"""The outputs of the ``tensorrt_llm`` model for what the engine reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.request import Metrics, Output
from draftline.runtime.speculation_numbers import SpeculationNumbers
from draftline.triton.contract import SPECULATION_OUTPUTS
from draftline.triton.generation_request import GenerationRequest
from draftline.triton.preprocessing import TextTokenizer


@dataclass(frozen=True)
class Sent:
    """What a row was sent in all its responses."""

    num_tokens: int = 0
    cum_log_prob: float = 0.0

    def after(self, outputs: Sequence[Output]) -> Sent:
        """Return what it was sent once ``outputs`` have left as well."""
        return Sent(
            self.num_tokens + sum(len(output.token_ids) for output in outputs),
            self.cum_log_prob + sum(sum(output.log_probs or ()) for output in outputs),
        )


def build_arrays(
    row: GenerationRequest, outputs: Sequence[Output], sent: Sent, tokenizer: TextTokenizer
) -> dict[str, NDArray[Any]]:
    """Build one response from consecutive outputs of a row.

    A stream carries what is new; a whole answer carries the prompt before it unless the row excludes it. Log
    probabilities and logits are those of the answer's tokens alone, new ones in a stream. ``sent`` includes
    ``outputs``. Performance metrics come with the last response.

    **Shapes**: ``output_ids [1, 1, length] int32``, ``sequence_length [1, 1] int32``, ``output_text [1, 1]``,
    ``output_log_probs [1, 1, new] float32``, ``generation_logits [1, 1, new, V] float32``, ``token_texts`` and
    ``is_draft [1, new]`` (see the contract), the others ``[1, 1]``.
    """
    token_ids = [token for output in outputs for token in output.token_ids]
    text = "".join(output.text or "" for output in outputs)
    if not row.streaming and not row.exclude_input_in_output:
        text = _put_prompt_before(row.prompt_ids, token_ids, text, tokenizer)
        token_ids = [*row.prompt_ids, *token_ids]
    # Triton drops empty tensors, so an answer without tokens is one padded place and the length 0.
    arrays: dict[str, NDArray[Any]] = {
        "output_ids": np.array(token_ids or [-1], np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(token_ids)]], np.int32),
        "output_text": _texts([text]),
    }
    if row.batch_index is not None:
        arrays["batch_index"] = _scalar(row.batch_index, np.int32)
    if row.reports.num_input_tokens:
        arrays["num_input_tokens"] = _scalar(len(row.prompt_ids), np.int32)
    if row.reports.num_output_tokens:
        arrays["num_output_tokens"] = _scalar(sent.num_tokens, np.int32)
    if row.reports.log_probs:
        log_probs = [value for output in outputs for value in output.log_probs or ()]
        arrays["output_log_probs"] = np.array(log_probs, np.float32).reshape(1, 1, -1)
        arrays["cum_log_probs"] = _scalar(sent.cum_log_prob, np.float32)
    if row.reports.generation_logits:
        logits = [output.logits for output in outputs if output.logits is not None]
        if logits:
            arrays["generation_logits"] = np.concatenate(logits)[None, None]
    if row.reports.acceptance:
        arrays.update(_build_acceptance(outputs))
    metrics = outputs[-1].metrics
    if metrics is not None:
        if row.reports.perf_metrics:
            arrays.update(_build_metrics(metrics))
        if row.reports.perf_metrics or row.reports.acceptance:
            arrays.update(_build_totals(metrics.speculation))
        if row.reports.acceptance:
            arrays.update(_build_counts(metrics.speculation))
    return arrays


def _build_acceptance(outputs: Sequence[Output]) -> dict[str, NDArray[Any]]:
    texts: list[str] = []
    is_draft: list[bool] = []
    for output in outputs:
        pieces = output.pieces or ()
        # Text that was held back may follow the last token, or come with no token at all.
        rest = (output.text or "")[sum(map(len, pieces)) :]
        texts += [*pieces, rest] if rest else pieces
        is_draft += [place < output.num_accepted_tokens for place in range(len(pieces) + bool(rest))]
    return {"token_texts": _texts(texts), "is_draft": np.array([is_draft], np.bool_)}


def _put_prompt_before(prompt_ids: Sequence[int], token_ids: Sequence[int], text: str, tokenizer: TextTokenizer) -> str:
    """Return the text of prompt and answer together.

    Some tokenizers drop the space before the first token: what stands before the answer is what decoding both as one
    puts there. Where the prompt ends inside a character, the two do not meet in whole characters and are just joined.
    """
    alone = tokenizer.decode(token_ids, skip_special_tokens=True)
    together = tokenizer.decode([*prompt_ids, *token_ids], skip_special_tokens=True)
    if together.endswith(alone):
        return together[: len(together) - len(alone)] + text
    return tokenizer.decode(prompt_ids, skip_special_tokens=True) + text


def _build_metrics(metrics: Metrics) -> dict[str, NDArray[Any]]:
    return {
        "kv_cache_alloc_new_blocks": _scalar(metrics.kv_cache_alloc_new_blocks, np.int32),
        "kv_cache_reused_blocks": _scalar(metrics.kv_cache_reused_blocks, np.int32),
        "kv_cache_alloc_total_blocks": _scalar(metrics.kv_cache_alloc_total_blocks, np.int32),
        "arrival_time_ns": _scalar(metrics.arrival_time_ns, np.int64),
        "first_scheduled_time_ns": _scalar(metrics.first_scheduled_time_ns, np.int64),
        "first_token_time_ns": _scalar(metrics.first_token_time_ns, np.int64),
        "last_token_time_ns": _scalar(metrics.last_token_time_ns, np.int64),
    }


def _build_totals(numbers: SpeculationNumbers) -> dict[str, NDArray[Any]]:
    return {
        "acceptance_rate": _scalar(numbers.acceptance_rate, np.float32),
        "total_accepted_draft_tokens": _scalar(numbers.num_accepted_tokens, np.int32),
        "total_draft_tokens": _scalar(numbers.num_drafted_tokens, np.int32),
    }


def _build_counts(numbers: SpeculationNumbers) -> dict[str, NDArray[Any]]:
    return {
        **{name: _scalar(getattr(numbers, field), np.int32) for name, field in SPECULATION_OUTPUTS.items()},
        "acceptance_histogram": np.array([numbers.histogram], np.int32),
    }


def _texts(texts: Sequence[str]) -> NDArray[Any]:
    return np.array([[text.encode("utf-8") for text in texts]], np.object_)


def _scalar(value: float, dtype: type[np.generic]) -> NDArray[Any]:
    return np.array([[value]], dtype)

"""The outputs of the ``tensorrt_llm`` model for what the engine reported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.request import Metrics, Output
from draftline.triton.generation_request import GenerationRequest
from draftline.triton.preprocessing import TextTokenizer


def build_arrays(
    row: GenerationRequest, outputs: Sequence[Output], num_output_tokens: int, tokenizer: TextTokenizer
) -> dict[str, NDArray[Any]]:
    """Build one response from consecutive outputs of a row.

    A stream carries what is new; a whole answer carries the prompt before it unless the row excludes it.
    ``num_output_tokens`` counts all tokens of the row so far. Performance metrics come with the last response.

    **Shapes**: ``output_ids [1, 1, length] int32``, ``sequence_length [1, 1] int32``, ``output_text [1, 1]``, the
    others ``[1, 1]``.
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
        "output_text": np.array([[text.encode("utf-8")]], np.object_),
    }
    if row.batch_index is not None:
        arrays["batch_index"] = _scalar(row.batch_index, np.int32)
    if row.return_num_input_tokens:
        arrays["num_input_tokens"] = _scalar(len(row.prompt_ids), np.int32)
    if row.return_num_output_tokens:
        arrays["num_output_tokens"] = _scalar(num_output_tokens, np.int32)
    metrics = outputs[-1].metrics
    if row.return_perf_metrics and metrics is not None:
        arrays.update(_build_metrics(metrics))
    return arrays


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
        # Plain decoding drafts nothing.
        "acceptance_rate": _scalar(0.0, np.float32),
        "total_accepted_draft_tokens": _scalar(0, np.int32),
        "total_draft_tokens": _scalar(0, np.int32),
    }


def _scalar(value: float, dtype: type[np.generic]) -> NDArray[Any]:
    return np.array([[value]], dtype)

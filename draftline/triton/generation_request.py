"""The inputs of the ``tensorrt_llm`` model, checked and in the project's words, one object per row of the batch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import RequestError
from draftline.runtime.request import SamplingParameters
from draftline.triton.contract import GENERATION_INPUTS
from draftline.triton.preprocessing import TextTokenizer, read_word_list
from draftline.triton.sampling_inputs import read_sampling
from draftline.triton.tensors import Arrays, client_name, read_scalar, refuse_unsupported


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against."""

    tokenizer: TextTokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]
    exclude_input_in_output: bool = False  # where a request does not say


@dataclass(frozen=True)
class Reports:
    """What a row wants beside its tokens and text: the ``return_*`` inputs."""

    num_input_tokens: bool = False
    num_output_tokens: bool = False
    perf_metrics: bool = False
    log_probs: bool = False
    generation_logits: bool = False
    acceptance: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """One row; ``batch_index`` is None where the batch has only one."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParameters
    end_ids: frozenset[int]
    stop_words: tuple[str, ...]
    streaming: bool
    exclude_input_in_output: bool
    speculate: bool = True
    max_draft_tokens: int | None = None
    reports: Reports = Reports()
    batch_index: int | None = None


def read_generation_requests(arrays: Arrays, model: ServedModel) -> list[GenerationRequest]:
    """Read and check the rows of a request. Raises RequestError naming the client's input."""
    refuse_unsupported(arrays, GENERATION_INPUTS)
    num_rows = arrays["request_output_len"].shape[0]
    if "input_ids" not in arrays:
        raise RequestError("input_ids", "must hold the prompt", "no input_ids", "send [B, length]")
    return [_read_row(arrays, model, row, num_rows) for row in range(num_rows)]


def _read_row(arrays: Arrays, model: ServedModel, row: int, num_rows: int) -> GenerationRequest:
    exclude_input = read_scalar(arrays, "exclude_input_in_output", row)
    speculate = read_scalar(arrays, "speculate", row)
    end_ids, stop_words = _read_ends(arrays, model, row)
    return GenerationRequest(
        prompt_ids=_read_prompt(arrays, model, row),
        max_tokens=_read_max_tokens(arrays, row),
        sampling=read_sampling(arrays, row, model.vocab_size),
        end_ids=end_ids,
        stop_words=stop_words,
        streaming=bool(read_scalar(arrays, "streaming", row)),
        exclude_input_in_output=model.exclude_input_in_output if exclude_input is None else bool(exclude_input),
        speculate=True if speculate is None else bool(speculate),
        max_draft_tokens=read_scalar(arrays, "max_draft_tokens", row),
        reports=Reports(
            **{field.name: bool(read_scalar(arrays, f"return_{field.name}", row)) for field in fields(Reports)}
        ),
        batch_index=row if num_rows > 1 else None,
    )


def _read_prompt(arrays: Arrays, model: ServedModel, row: int) -> tuple[int, ...]:
    input_ids = arrays["input_ids"]
    length = read_scalar(arrays, "input_lengths", row)
    if not 0 < length <= input_ids.shape[-1] or row >= input_ids.shape[0]:
        raise RequestError(
            "input_lengths", "must be from 1 to the length of input_ids", length, f"input_ids has {input_ids.shape[-1]}"
        )
    ids: NDArray[Any] = input_ids[row, :length]
    if np.any((ids < 0) | (ids >= model.vocab_size)):
        bad = int(ids[(ids < 0) | (ids >= model.vocab_size)][0])
        raise RequestError(
            "input_ids", f"ids must be from 0 to {model.vocab_size - 1}", bad, "use the model's tokenizer"
        )
    return tuple(ids.tolist())


def _read_max_tokens(arrays: Arrays, row: int) -> int:
    max_tokens = read_scalar(arrays, "request_output_len", row)
    if max_tokens is None or max_tokens <= 0:
        raise RequestError(client_name("max_tokens"), "must be >= 1", max_tokens, "send how many tokens you want")
    return int(max_tokens)


def _read_ends(arrays: Arrays, model: ServedModel, row: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return what ends the answer: token ids and stop words.

    One of the model's own end ids (preprocessing sends the tokenizer's) stands for all of them, another id for itself,
    -1 for none. A stop word that is one special token ends by id: special tokens have no text to compare.
    """
    end_id = read_scalar(arrays, "end_id", row)
    if end_id is None or end_id in model.eos_token_ids:
        end_ids = set(model.eos_token_ids)
    else:
        end_ids = {end_id} if end_id >= 0 else set()
    stop_words = []
    word_lists = arrays.get("stop_words_list")
    for ids in read_word_list(word_lists[row], "stop_words_list") if word_lists is not None else []:
        if len(ids) == 1 and not model.tokenizer.decode(ids, skip_special_tokens=True):
            end_ids.add(ids[0])
        else:
            stop_words.append(model.tokenizer.decode(ids, skip_special_tokens=False))
    return frozenset(end_ids), tuple(stop_words)

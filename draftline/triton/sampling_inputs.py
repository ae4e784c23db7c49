"""The sampling inputs of the ``tensorrt_llm`` model: randomness, penalties, bias, bans."""

from __future__ import annotations

import math

import numpy as np

from draftline.errors import RequestError
from draftline.runtime.limits import MAX_BIAS
from draftline.runtime.request import SamplingParameters
from draftline.triton.preprocessing import read_word_list
from draftline.triton.tensors import Arrays, read_either, read_scalar


def read_sampling(arrays: Arrays, row: int, vocab_size: int) -> SamplingParameters:
    """Turn the classic sampling inputs of a row into ``SamplingParameters``.

    As TensorRT-LLM: nothing given, ``top_k`` 1 or ``temperature`` 0 mean greedy; ``top_p`` <= 0 is ignored; the seed
    defaults to 0. Deviation: a ``temperature`` > 0 alone samples from the full distribution, where TensorRT-LLM falls
    back to ``top_k`` 1 and ignores it.

    **Raises** RequestError for what the engine could not name as the client does: randomness, the form of word lists
    and biases. The engine checks the rest.
    """
    temperature, top_k, top_p = _read_randomness(arrays, row)
    return SamplingParameters(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=read_either(arrays, "seed", "random_seed", row) or 0,
        repetition_penalty=_read_penalty(arrays, "repetition_penalty", 1.0, row),
        presence_penalty=_read_penalty(arrays, "presence_penalty", 0.0, row),
        frequency_penalty=_read_penalty(arrays, "frequency_penalty", 0.0, row),
        min_tokens=read_either(arrays, "min_tokens", "min_length", row) or 0,
        bad_words=_read_bad_words(arrays, row),
        logit_bias=_read_bias(arrays, row, vocab_size),
    )


def _read_randomness(arrays: Arrays, row: int) -> tuple[float, int, float]:
    temperature = read_scalar(arrays, "temperature", row)
    top_k = read_scalar(arrays, "runtime_top_k", row)
    top_p = read_scalar(arrays, "runtime_top_p", row)
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError("temperature", "must be finite and >= 0", temperature, "send 0 for greedy decoding")
    if top_k is not None and top_k < 0:
        raise RequestError("top_k", "must be >= 0", top_k, "send 0 to turn it off")
    if top_p is not None and not top_p <= 1:
        raise RequestError("top_p", "must be <= 1", top_p, "send 1 to turn it off")
    has_top_p = top_p is not None and top_p > 0
    samples = temperature is not None or bool(top_k) or has_top_p
    if not samples or temperature == 0 or top_k == 1:
        return 0.0, 0, 1.0
    return 1.0 if temperature is None else temperature, top_k or 0, top_p if has_top_p else 1.0


def _read_penalty(arrays: Arrays, name: str, neutral: float, row: int) -> float:
    penalty = read_scalar(arrays, name, row)
    return neutral if penalty is None else float(penalty)


def _read_bad_words(arrays: Arrays, row: int) -> tuple[tuple[int, ...], ...]:
    word_lists = arrays.get("bad_words_list")
    words = [] if word_lists is None else read_word_list(word_lists[row], "bad_words_list")
    return tuple(tuple(word) for word in words)


def _read_bias(arrays: Arrays, row: int, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return what is not 0 of ``embedding_bias [B, n] float32``; ids from n on have no bias."""
    biases = arrays.get("embedding_bias")
    if biases is None or biases.size == 0:
        return ()
    if biases.shape[1] > vocab_size:
        raise RequestError(
            "embedding_bias",
            f"must hold at most {vocab_size} values per row, one for each token id",
            biases.shape[1],
            "use the model's tokenizer",
        )
    bias = biases[row]
    outside = bias[~(np.abs(bias) <= MAX_BIAS)]
    if outside.size:
        rule = f"must lie in {-MAX_BIAS:g}..{MAX_BIAS:g}"
        raise RequestError("embedding_bias", rule, float(outside[0]), "send bad_words to ban a token")
    return tuple((int(token), float(bias[token])) for token in np.flatnonzero(bias))

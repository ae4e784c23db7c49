"""What the preprocessing model does: text to token ids, words to word lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from draftline.errors import RequestError
from draftline.triton.contract import PREPROCESSING_INPUTS
from draftline.triton.tensors import Arrays, decode_text, read_scalar, refuse_unsupported


class TextTokenizer(Protocol):
    """The part of ``draftline.checkpoints.tokenizer.Tokenizer`` that serving needs."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Preprocessor:
    """Turn the arrays of a preprocessing request into the arrays of its response."""

    def __init__(self, tokenizer: TextTokenizer, *, add_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens

    def preprocess(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Tokenise a batch of B prompts.

        **Shapes**: ``INPUT_ID [B, longest] int32`` padded with the pad id, ``REQUEST_INPUT_LEN [B, 1]``,
        ``STOP_WORDS_IDS`` and ``BAD_WORDS_IDS [B, 2, W]`` in the word-list format of ``build_word_lists``;
        ``EMBEDDING_BIAS [B, vocabulary] float32``, ``[B, 1]`` where no row has a bias (Triton drops empty tensors).

        As TensorRT-LLM, words are tokenised exactly as they are given: ``"no"`` does not stand for ``" no"`` as well,
        which most tokenizers write with other tokens. A bias of several tokens is added to each. Deviation: the words
        of a bias get no special tokens, so that no weight goes to the one that begins every text.

        **Raises** RequestError for an empty prompt, text that is not UTF-8, and inputs this version does not serve.
        """
        refuse_unsupported(arrays, PREPROCESSING_INPUTS)
        queries = arrays["QUERY"]
        num_rows = queries.shape[0]
        prompts = [self._encode_prompt(read_scalar(arrays, "QUERY", row)) for row in range(num_rows)]
        end_ids = [
            self._default(read_scalar(arrays, "END_ID", row), self._tokenizer.eos_token_id) for row in range(num_rows)
        ]
        pad_ids = [
            self._default(read_scalar(arrays, "PAD_ID", row), self._tokenizer.pad_token_id, end_ids[row])
            for row in range(num_rows)
        ]
        lengths = [len(prompt) for prompt in prompts]
        input_ids = np.array(pad_ids, np.int32)[:, None].repeat(max(lengths), axis=1)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt)] = prompt
        no_words = np.zeros((num_rows, 0), np.object_)
        bad_words = arrays.get("BAD_WORDS_DICT", no_words)
        stop_words = arrays.get("STOP_WORDS_DICT", no_words)
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": _column(lengths),
            "BAD_WORDS_IDS": build_word_lists([self._encode_bad_words(row) for row in bad_words]),
            "STOP_WORDS_IDS": build_word_lists([self._encode_stop_words(row) for row in stop_words]),
            "EMBEDDING_BIAS": self._build_bias(arrays, num_rows),
            "REQUEST_OUTPUT_LEN": arrays["REQUEST_OUTPUT_LEN"].astype(np.int32).reshape(num_rows, -1),
            "OUT_END_ID": _column(end_ids),
            "OUT_PAD_ID": _column(pad_ids),
        }

    def _encode_prompt(self, query: bytes | str) -> list[int]:
        text = decode_text(query, "text_input")
        ids = self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens) if text else []
        if not ids:
            raise RequestError("text_input", "must hold at least one token", "an empty prompt", "send some text")
        return ids

    def _encode_word(self, word: str) -> list[int]:
        return self._tokenizer.encode(word, add_special_tokens=False)

    def _encode_bad_words(self, words: NDArray[Any]) -> list[list[int]]:
        return [ids for word in _decode_words(words, "bad_words") if (ids := self._encode_word(word))]

    def _encode_stop_words(self, words: NDArray[Any]) -> list[list[int]]:
        encoded = []
        for word in _decode_words(words, "stop_words"):
            ids = self._encode_word(word)
            # The engine compares text, and the word travels as ids: it must come out as it went in.
            if self._tokenizer.decode(ids, skip_special_tokens=False) != word:
                raise RequestError("stop_words", "must survive tokenisation", repr(word), "choose another stop word")
            encoded.append(ids)
        return encoded

    def _build_bias(self, arrays: Arrays, num_rows: int) -> NDArray[np.float32]:
        """Return the bias of every token id, ``[B, vocabulary]``."""
        no_words, no_weights = np.zeros((num_rows, 0), np.object_), np.zeros((num_rows, 0), np.float32)
        words = arrays.get("EMBEDDING_BIAS_WORDS", no_words).reshape(num_rows, -1)
        weights = arrays.get("EMBEDDING_BIAS_WEIGHTS", no_weights).reshape(num_rows, -1)
        if not weights.size and not any(words.ravel()):
            return np.zeros((num_rows, 1), np.float32)
        if words.shape != weights.shape:
            raise RequestError(
                "embedding_bias_weights",
                f"must be as many as embedding_bias_words, {words.shape[1]}",
                weights.shape[1],
                "send one weight per word",
            )
        bias = np.zeros((num_rows, self._tokenizer.vocab_size), np.float32)
        for row, place in np.ndindex(*words.shape):
            text = decode_text(words[row, place], "embedding_bias_words")
            for token in self._encode_word(text):
                bias[row, token] += weights[row, place]
        return bias

    @staticmethod
    def _default(*choices: int | None) -> int:
        # -1 (no such token) is the classic contract's way to say "never".
        return next((choice for choice in choices if choice is not None), -1)


def build_word_lists(rows: Sequence[Sequence[Sequence[int]]]) -> NDArray[np.int32]:
    """Build TensorRT-LLM's word lists: row 0 the concatenated token ids, row 1 the cumulative end offsets.

    **Shapes**: B rows of words of ids -> ``[B, 2, W] int32``, W = most ids of a row, at least 1; ids are padded with 0,
    offsets with -1.

    >>> build_word_lists([[[5, 6], [7]]]).tolist()
    [[[5, 6, 7], [2, 3, -1]]]
    """
    width = max([1, *(sum(map(len, words)) for words in rows)])
    lists = np.zeros((len(rows), 2, width), np.int32)
    lists[:, 1] = -1
    for row, words in enumerate(rows):
        ids = [token for word in words for token in word]
        lists[row, 0, : len(ids)] = ids
        lists[row, 1, : len(words)] = np.cumsum([len(word) for word in words])
    return lists


def read_word_list(word_list: NDArray[np.int32], where: str) -> list[list[int]]:
    """Return the words of one ``[2, W]`` word list; the inverse of ``build_word_lists`` for a row.

    **Raises** RequestError naming the input ``where``, where the offsets do not rise or exceed the list.

    >>> read_word_list(np.array([[5, 6, 7], [2, 3, -1]], np.int32), "bad_words_list")
    [[5, 6], [7]]
    """
    words: list[list[int]] = []
    start = 0
    for end in word_list[1].tolist():
        if end == -1:
            break
        if not start < end <= word_list.shape[1]:
            raise RequestError(
                where, "offsets must rise and stay inside the list", word_list[1].tolist(), "see the format"
            )
        words.append(word_list[0, start:end].tolist())
        start = end
    return words


def _decode_words(words: NDArray[Any], where: str) -> list[str]:
    """Return the words without the empty ones, which is how classic clients say "none"."""
    return [word for word in (decode_text(value, where) for value in words.ravel()) if word]


def _column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)[:, None]

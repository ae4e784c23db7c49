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
        ``STOP_WORDS_IDS [B, 2, W]`` in the word-list format of ``build_word_lists``.

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
        stop_words = arrays.get("STOP_WORDS_DICT", np.zeros((num_rows, 0), np.object_))
        return {
            "INPUT_ID": input_ids,
            "REQUEST_INPUT_LEN": _column(lengths),
            "BAD_WORDS_IDS": build_word_lists([[] for _ in range(num_rows)]),
            "STOP_WORDS_IDS": build_word_lists([self._encode_words(row) for row in stop_words]),
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

    def _encode_words(self, words: NDArray[Any]) -> list[list[int]]:
        encoded = []
        for word in (decode_text(value, "stop_words") for value in words.ravel()):
            if not word:
                continue
            ids = self._tokenizer.encode(word, add_special_tokens=False)
            # The engine compares text, and the word travels as ids: it must come out as it went in.
            if self._tokenizer.decode(ids, skip_special_tokens=False) != word:
                raise RequestError("stop_words", "must survive tokenisation", repr(word), "choose another stop word")
            encoded.append(ids)
        return encoded

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


def read_word_list(word_list: NDArray[np.int32]) -> list[list[int]]:
    """Return the words of one ``[2, W]`` word list; the inverse of ``build_word_lists`` for a row.

    **Raises** RequestError where the offsets do not rise or exceed the list.

    >>> read_word_list(np.array([[5, 6, 7], [2, 3, -1]], np.int32))
    [[5, 6], [7]]
    """
    words: list[list[int]] = []
    start = 0
    for end in word_list[1].tolist():
        if end == -1:
            break
        if not start < end <= word_list.shape[1]:
            raise RequestError(
                "stop_words_list", "offsets must rise and stay inside the list", word_list[1].tolist(), "see the format"
            )
        words.append(word_list[0, start:end].tolist())
        start = end
    return words


def _column(values: Sequence[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)[:, None]

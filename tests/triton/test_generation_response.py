"""Responses of whole answers."""

from __future__ import annotations

import pytest

from draftline.runtime.request import Output, SamplingParameters
from draftline.triton.generation_request import GenerationRequest
from draftline.triton.generation_response import Sent, build_arrays


class WordTokenizer:
    """Words with a space before each, which decoding drops from the first: the way of SentencePiece."""

    eos_token_id = pad_token_id = None
    vocab_size = 4
    words = ("the", "end", "of", "it")

    def encode(self, text, add_special_tokens=True):
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(self.words[token] for token in ids)


def make_row(exclude: bool) -> GenerationRequest:
    return GenerationRequest((0, 1), 9, SamplingParameters(), frozenset(), (), False, exclude)


@pytest.mark.parametrize(
    ("token_ids", "text", "whole"),
    [
        ((2, 3), "of it", "the end of it"),
        ((2, 3), "of ", "the end of "),  # cut before the stop word "it"
        ((2,), "", "the end "),  # cut before the stop word "of"
        ((), "", "the end"),
    ],
)
def test_the_space_between_prompt_and_answer_survives(token_ids, text, whole) -> None:
    outputs = [Output("x", token_ids, text, "stop_words")]
    arrays = build_arrays(make_row(exclude=False), outputs, Sent().after(outputs), WordTokenizer())
    assert arrays["output_text"].item().decode() == whole
    assert arrays["sequence_length"].item() == 2 + len(token_ids)
    alone = build_arrays(make_row(exclude=True), outputs, Sent().after(outputs), WordTokenizer())
    assert alone["output_text"].item().decode() == text
    assert alone["sequence_length"].item() == len(token_ids)

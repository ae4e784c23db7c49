"""Prompts to ids, word lists there and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import RequestError
from draftline.triton.postprocessing import Postprocessor
from draftline.triton.preprocessing import Preprocessor, build_word_lists, read_word_list
from tests.tiny_checkpoints import write_tiny_checkpoint

WORDS = st.lists(st.lists(st.integers(0, 50000), min_size=1, max_size=5), max_size=5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer")))


def arrays(*texts: bytes, **more: object) -> dict[str, np.ndarray]:
    queries = np.array([[text] for text in texts], np.object_)
    return {"QUERY": queries, "REQUEST_OUTPUT_LEN": np.full((len(texts), 1), 5, np.int32), **more}


@given(st.lists(WORDS, min_size=1, max_size=3))
def test_word_lists_come_back(rows) -> None:
    lists = build_word_lists(rows)
    assert lists.shape[1] == 2
    assert [read_word_list(row, "stop_words_list") for row in lists] == rows


@pytest.mark.parametrize("offsets", [[2, 1], [0, 1], [3, -1]])
def test_damaged_word_lists_are_refused(offsets) -> None:
    with pytest.raises(RequestError, match=r"^bad_words_list: offsets must rise"):
        read_word_list(np.array([[5, 6], offsets], np.int32), "bad_words_list")


def test_a_batch_is_padded_to_its_longest_prompt(tokenizer) -> None:
    result = Preprocessor(tokenizer, add_special_tokens=True).preprocess(arrays(b"hello", "你好".encode()))
    lengths = result["REQUEST_INPUT_LEN"].ravel().tolist()
    assert lengths == [1, 6]
    assert result["INPUT_ID"].shape == (2, 6)
    assert set(result["INPUT_ID"][0, 1:].tolist()) == {result["OUT_PAD_ID"][0, 0]}
    assert tokenizer.decode(result["INPUT_ID"][1].tolist()) == "你好"


def test_ends_default_to_the_tokenizer_and_are_taken_from_the_request(tokenizer) -> None:
    preprocessor = Preprocessor(tokenizer, add_special_tokens=True)
    assert preprocessor.preprocess(arrays(b"a"))["OUT_END_ID"].item() == tokenizer.eos_token_id
    assert preprocessor.preprocess(arrays(b"a", END_ID=np.array([[7]], np.int32)))["OUT_END_ID"].item() == 7


def test_stop_words_skip_empty_strings(tokenizer) -> None:
    words = np.array([["", "the end", "<|im_end|>"]], np.object_)
    lists = Preprocessor(tokenizer, add_special_tokens=True).preprocess(arrays(b"a", STOP_WORDS_DICT=words))
    ids = read_word_list(lists["STOP_WORDS_IDS"][0], "stop_words_list")
    assert [tokenizer.decode(word, skip_special_tokens=False) for word in ids] == ["the end", "<|im_end|>"]


def test_bad_words_are_tokenised_as_they_are_given(tokenizer) -> None:
    words = np.array([["", " the", "the"], ["hello", "", ""]], np.object_)
    lists = Preprocessor(tokenizer, add_special_tokens=True).preprocess(arrays(b"a", b"b", BAD_WORDS_DICT=words))
    ids = [read_word_list(row, "bad_words_list") for row in lists["BAD_WORDS_IDS"]]
    assert [[tokenizer.decode(word) for word in row] for row in ids] == [[" the", "the"], ["hello"]]
    assert ids[0][0] != ids[0][1]


def test_a_bias_is_added_to_every_token_of_its_word(tokenizer) -> None:
    words = np.array([["hello", "in", "hello"], ["", "", "he"]], np.object_)
    weights = np.array([[1.5, -2.0, 1.0], [9.0, 9.0, 4.0]], np.float32)
    given = arrays(b"a", b"b", EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)
    bias = Preprocessor(tokenizer, add_special_tokens=True).preprocess(given)["EMBEDDING_BIAS"]
    assert (bias.shape, bias.dtype) == ((2, tokenizer.vocab_size), np.float32)
    (hello,), (inside,), (he,) = (tokenizer.encode(word) for word in ("hello", "in", "he"))
    assert {int(token): float(bias[0, token]) for token in np.flatnonzero(bias[0])} == {hello: 2.5, inside: -2.0}
    assert {int(token): float(bias[1, token]) for token in np.flatnonzero(bias[1])} == {he: 4.0}


@pytest.mark.parametrize("given", [{}, {"EMBEDDING_BIAS_WORDS": np.array([[b""]], np.object_)}])
def test_no_bias_is_one_zero(tokenizer, given) -> None:
    bias = Preprocessor(tokenizer, add_special_tokens=True).preprocess(arrays(b"a", **given))["EMBEDDING_BIAS"]
    assert bias.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (arrays(b""), "text_input: must hold at least one token"),
        (arrays(b"ab\xff"), "text_input: must be valid UTF-8; got byte 0xff at offset 2"),
        (arrays(b"a", STOP_WORDS_DICT=np.array([[b"\xff"]], np.object_)), "stop_words: must be valid UTF-8"),
        (arrays(b"a", BAD_WORDS_DICT=np.array([[b"\xff"]], np.object_)), "bad_words: must be valid UTF-8"),
        (
            arrays(b"a", EMBEDDING_BIAS_WORDS=np.array([[b"no"]], np.object_)),
            "embedding_bias_weights: must be as many as embedding_bias_words, 1; got 0",
        ),
        (arrays(b"a", DECODER_QUERY=np.array([[b"no"]], np.object_)), "decoder_text_input: is not supported"),
    ],
)
def test_bad_inputs_are_refused_by_the_clients_name(tokenizer, inputs, message) -> None:
    with pytest.raises(RequestError, match=message):
        Preprocessor(tokenizer, add_special_tokens=True).preprocess(inputs)


def test_postprocessing_takes_the_engines_text_and_decodes_only_without_it(tokenizer) -> None:
    postprocessor = Postprocessor(tokenizer, skip_special_tokens=True)
    ids = tokenizer.encode("hello 😀")
    tokens = {"TOKENS_BATCH": np.array([[[*ids, -1]]], np.int32), "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32)}
    assert postprocessor.postprocess(tokens)["OUTPUT"].item().decode() == "hello 😀"
    text = np.array([[b"from the engine"]], np.object_)
    assert postprocessor.postprocess({**tokens, "TEXT": text})["OUTPUT"].item() == b"from the engine"

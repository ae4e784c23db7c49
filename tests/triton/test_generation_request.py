"""Rows of the ``tensorrt_llm`` model: sampling defaults, ends, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import RequestError
from draftline.runtime.request import SamplingParameters
from draftline.triton.generation_request import Reports, ServedModel, read_generation_requests
from draftline.triton.preprocessing import build_word_lists
from tests.tiny_checkpoints import NUM_TOKENS, write_tiny_checkpoint

GREEDY = SamplingParameters()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ServedModel:
    tokenizer = load_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer")))
    return ServedModel(tokenizer, vocab_size=NUM_TOKENS, eos_token_ids=frozenset([0, 2]))


def row(**inputs: object) -> dict[str, np.ndarray]:
    given = {"input_ids": np.array([[5, 6, 7]], np.int32), "input_lengths": 3, "request_output_len": 9, **inputs}
    return {name: value if isinstance(value, np.ndarray) else np.array([value]) for name, value in given.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, GREEDY),
        ({"runtime_top_k": 1, "temperature": 0.8}, GREEDY),
        ({"temperature": 0.0, "runtime_top_p": 0.5}, GREEDY),
        ({"runtime_top_p": 0.0}, GREEDY),
        ({"runtime_top_k": 0}, GREEDY),
        ({"seed": 7}, SamplingParameters(seed=7)),
        ({"temperature": 0.8}, SamplingParameters(temperature=0.8)),
        ({"temperature": 0.8, "runtime_top_p": -1.0}, SamplingParameters(temperature=0.8)),
        ({"runtime_top_k": 5}, SamplingParameters(temperature=1.0, top_k=5)),
        (
            {"runtime_top_p": 0.9, "seed": np.array([2**63], np.uint64)},
            SamplingParameters(temperature=1.0, top_p=0.9, seed=2**63),
        ),
        (
            {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0,
             "bad_words_list": build_word_lists([[]]), "embedding_bias": np.zeros((1, 1), np.float32)},
            GREEDY,
        ),
        ({"repetition_penalty": 1.25, "seed": 3}, SamplingParameters(repetition_penalty=1.25, seed=3)),
        ({"presence_penalty": -0.5}, SamplingParameters(presence_penalty=-0.5)),
        ({"frequency_penalty": 0.5}, SamplingParameters(frequency_penalty=0.5)),
        ({"min_tokens": 4, "min_length": 4}, SamplingParameters(min_tokens=4)),
        ({"min_length": 5}, SamplingParameters(min_tokens=5)),
        ({"bad_words_list": build_word_lists([[[5, 6], [7]]])}, SamplingParameters(bad_words=((5, 6), (7,)))),
        (
            {"embedding_bias": np.array([[0.0, 1.5, 0.0, -2.0]], np.float32)},
            SamplingParameters(logit_bias=((1, 1.5), (3, -2.0))),
        ),
    ],
)  # fmt: skip
def test_sampling_as_classic_clients_expect(model, given, expected) -> None:
    assert read_generation_requests(row(**given), model)[0].sampling == expected


def test_every_row_has_its_own_words_and_bias(model) -> None:
    inputs = row(
        input_ids=np.array([[5, 6, 7]] * 2),
        input_lengths=np.array([3, 3]),
        request_output_len=np.array([1, 1]),
        bad_words_list=build_word_lists([[[5]], [[6, 7], [8]]]),
        embedding_bias=np.array([[0, 1], [2, 0]], np.float32),
        speculate=np.array([True, False]),
        return_log_probs=np.array([False, True]),
    )
    rows = read_generation_requests(inputs, model)
    assert [one.sampling.bad_words for one in rows] == [((5,),), ((6, 7), (8,))]
    assert [one.sampling.logit_bias for one in rows] == [((1, 1.0),), ((0, 2.0),)]
    assert [one.speculate for one in rows] == [True, False]
    assert [one.reports for one in rows] == [Reports(), Reports(log_probs=True)]


@pytest.mark.parametrize(("given", "expected"), [({}, (True, None)), ({"speculate": False}, (False, None))])
def test_speculation_is_the_servers_choice_unless_given(model, given, expected) -> None:
    request = read_generation_requests(row(**given), model)[0]
    assert (request.speculate, request.max_draft_tokens) == expected
    assert read_generation_requests(row(max_draft_tokens=0), model)[0].max_draft_tokens == 0


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"temperature": -0.5}, "^temperature: must be finite and >= 0; got -0.5"),
        ({"temperature": float("nan")}, "^temperature: "),
        ({"runtime_top_k": -1}, "^top_k: "),
        ({"runtime_top_p": 1.5}, "^top_p: "),
        ({"runtime_top_p": float("nan")}, "^top_p: "),
        ({"request_output_len": 0}, "^max_tokens: must be >= 1; got 0"),
        ({"request_output_len": -4}, "^max_tokens: "),
        ({"input_lengths": 4}, "^input_lengths: "),
        ({"input_lengths": 0}, "^input_lengths: "),
        ({"input_ids": np.array([[5, NUM_TOKENS, 7]])}, f"^input_ids: .*got {NUM_TOKENS}"),
        ({"seed": 1, "random_seed": 2}, "^random_seed: is the old spelling"),
        ({"beam_width": 4}, "^beam_width: is not supported"),
        ({"return_context_logits": True}, "^return_context_logits: is not supported"),
        ({"min_tokens": 1, "min_length": 2}, "^min_length: is the old spelling of min_tokens"),
        ({"bad_words_list": np.array([[[5, 6], [2, 1]]])}, "^bad_words_list: offsets must rise"),
        ({"embedding_bias": np.zeros((1, NUM_TOKENS + 1), np.float32)}, "^embedding_bias: must hold at most"),
        ({"embedding_bias": np.array([[0.0, np.inf]], np.float32)}, r"^embedding_bias: must lie in .*1e\+09; got inf"),
        ({"embedding_bias": np.array([[np.nan]], np.float32)}, r"^embedding_bias: must lie in .*1e\+09; got nan"),
        ({"embedding_bias": np.array([[-1e10]], np.float32)}, r"^embedding_bias: must lie in .*1e\+09; got -1"),
    ],
)
def test_bad_inputs_are_refused_by_name(model, inputs, message) -> None:
    with pytest.raises(RequestError, match=message):
        read_generation_requests(row(**inputs), model)


def test_old_spelling_of_the_seed(model) -> None:
    assert read_generation_requests(row(random_seed=3), model)[0].sampling.seed == 3


@pytest.mark.parametrize(
    ("end_id", "expected"), [(None, {0, 2}), (2, {0, 2}), (0, {0, 2}), (9, {9}), (-1, set()), (-2, set())]
)
def test_one_of_the_models_end_ids_stands_for_all(model, end_id, expected) -> None:
    inputs = {} if end_id is None else {"end_id": end_id}
    assert read_generation_requests(row(**inputs), model)[0].end_ids == expected


def test_a_special_token_as_stop_word_ends_by_id(model) -> None:
    words = [model.tokenizer.encode(word, add_special_tokens=False) for word in ("<|im_start|>", "the end")]
    request = read_generation_requests(row(stop_words_list=build_word_lists([words]), end_id=-1), model)[0]
    assert request.end_ids == {1}
    assert request.stop_words == ("the end",)


def test_rows_of_a_batch(model) -> None:
    inputs = row(
        input_ids=np.array([[5, 6, 7], [8, 9, 0]], np.int32),
        input_lengths=np.array([3, 2]),
        request_output_len=np.array([1, 2]),
    )
    rows = read_generation_requests(inputs, model)
    assert [(one.batch_index, one.prompt_ids, one.max_tokens) for one in rows] == [(0, (5, 6, 7), 1), (1, (8, 9), 2)]

"""The classic names told in the words of TensorRT-LLM's llmapi model, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftline.errors import RequestError
from draftline.triton.contract import ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS
from draftline.triton.llmapi_contract import FRONT, IGNORED, INPUT_NAMES, INPUTS, NEUTRAL, OUTPUT_NAMES, OUTPUTS, STOP
from draftline.triton.llmapi_front import Answer, tell_request
from tests.triton.classic_client import scalars


def test_the_tables_name_tensors_that_are_there() -> None:
    classic = {tensor.name: tensor for tensor in ENSEMBLE_INPUTS}
    theirs = {tensor.name: tensor for tensor in INPUTS}
    for name, told in INPUT_NAMES.items():
        assert classic[name].datatype == theirs[told].datatype, name
    assert set(NEUTRAL) | set(IGNORED) <= set(classic) - set(INPUT_NAMES)
    outputs = {tensor.name: tensor.datatype for tensor in ENSEMBLE_OUTPUTS}
    for tensor in OUTPUTS:
        if tensor.name in OUTPUT_NAMES:
            assert outputs[OUTPUT_NAMES[tensor.name]] == tensor.datatype, tensor.name
    assert [tensor.name for tensor in FRONT.inputs] == [*(tensor.name for tensor in ENSEMBLE_INPUTS), STOP]


def test_a_request_loses_its_batch_dimension_and_gets_their_names() -> None:
    words = np.array([[b"stop", b""]], np.object_)
    told = tell_request(
        {**scalars(text_input="hi", max_tokens=7, temperature=0.5, seed=3, stream=True, pad_id=2), "stop_words": words}
    )
    assert {name: value.tolist() for name, value in told.items()} == {
        "text_input": [b"hi"],
        "sampling_param_stop": [b"stop"],
        "sampling_param_max_tokens": [7],
        "sampling_param_temperature": [0.5],
        "sampling_param_seed": [3],
        "streaming": [True],
    }
    assert told["sampling_param_seed"].dtype == np.uint64
    assert told["sampling_param_max_tokens"].dtype == np.int32
    assert tell_request(scalars(text_input="hi", random_seed=4))["sampling_param_seed"].tolist() == [4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"return_log_probs": True}, "return_log_probs: is not supported by this version; got True"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: is not supported .*; leave it out or send 1.0"),
        ({"end_id": 5}, "end_id: is not supported"),
        ({"beam_width": 4}, "beam_width: is not supported"),
        ({"speculate": False}, "speculate: is not supported"),
        ({"seed": 1, "random_seed": 2}, "random_seed: is the old spelling of seed"),
    ],
)
def test_what_the_model_has_no_word_for_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tell_request(scalars(text_input="hi", max_tokens=1, **given))


def test_values_that_mean_nothing_are_accepted() -> None:
    neutral = {"beam_width": 1, "return_log_probs": False, "length_penalty": 1.0, "speculate": True}
    told = tell_request(scalars(text_input="hi", max_tokens=1, **neutral))
    assert set(told) == {"text_input", "sampling_param_max_tokens"}


def test_a_batch_is_refused() -> None:
    with pytest.raises(RequestError, match=r"text_input: must have one row; got 2"):
        tell_request({"text_input": np.array([[b"a"], [b"b"]], np.object_)})


def test_streamed_text_is_told_once() -> None:
    answer = Answer(is_streamed=True)
    texts = [b"Wh", b"Wh\xc3\xa9n", b"Wh\xc3\xa9n", b"Wh\xc3\xa9n!"]
    told = [answer.tell_response({"text_output": np.array([text], np.object_)})["text_output"] for text in texts]
    assert [value.tolist() for value in told] == [[[b"Wh"]], [[b"\xc3\xa9n"]], [[b""]], [[b"!"]]]
    whole = Answer(is_streamed=False).tell_response({"text_output": np.array(["all"], np.object_)})
    assert whole["text_output"].tolist() == [[b"all"]]


def test_numbers_that_come_as_text_become_numbers() -> None:
    given = {
        "text_output": np.array([b"x"], np.object_),
        "acceptance_rate": np.array([b"0.5"], np.object_),
        "total_draft_tokens": np.array([b"8"], np.object_),
        "kv_cache_reused_block": np.array([3], np.int32),
        "arrival_time_ns": np.array([b"None"], np.object_),
        "kv_cache_hit_rate": np.array([b"1.0"], np.object_),
    }
    told = Answer(is_streamed=False).tell_response(given)
    assert set(told) == {"text_output", "acceptance_rate", "total_draft_tokens", "kv_cache_reused_blocks"}
    assert told["acceptance_rate"].dtype == np.float32
    assert told["total_draft_tokens"].tolist() == [[8]]

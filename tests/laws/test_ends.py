"""Answers end at every offset of an accepted run: end ids, stop words, ``max_tokens``, cancels."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.runtime.request import Request, SamplingParameters
from draftline.runtime.text_stream import TextStream
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import CHAIN, DYNAMIC, Said, assert_said_plainly, make_request, make_requests

DEPTH_4 = CHAIN  # accepted whole: a run is 4 drafted tokens and the bonus token
SAMPLING = SamplingParameters(0.9, seed=21)
PROMPT = [10, 60, 33]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> Said:
    return engines.open().serve().run_all([make_request("a", PROMPT, 24, sampling=SAMPLING)])["a"]


def serve(engines: Engines, request: Request) -> Said:
    traffic = engines.open("llama", "itself", DEPTH_4).serve()
    said = traffic.run_all([request])[request.request_id]
    metrics = said.last.metrics
    assert metrics is not None
    assert metrics.num_input_tokens == len(request.prompt_ids)
    assert metrics.num_output_tokens == len(said.token_ids)
    assert [output.finish_reason for output in said.outputs[:-1]] == [None] * (len(said.outputs) - 1)
    return said


@pytest.mark.parametrize("offset", range(12))
def test_an_end_id_at_every_offset(engines: Engines, plain: Said, offset: int) -> None:
    end_id = plain.token_ids[offset]
    first = plain.token_ids.index(end_id)
    said = serve(engines, make_request("a", PROMPT, 24, sampling=SAMPLING, end_ids=frozenset({end_id})))
    assert said.token_ids == plain.token_ids[:first]
    assert said.last.finish_reason == "end_id"
    assert sum(output.num_accepted_tokens for output in said.outputs) <= max(first - 1, 0)


def test_end_ids_are_met_within_runs(plain: Said) -> None:
    """Each of the offsets above is the first of its token, or the test would not look at all of them."""
    assert len(set(plain.token_ids[:12])) > 8


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_max_tokens_at_every_offset(engines: Engines, plain: Said, max_tokens: int) -> None:
    said = serve(engines, make_request("a", PROMPT, max_tokens, sampling=SAMPLING))
    assert said.token_ids == plain.token_ids[:max_tokens]
    assert said.last.finish_reason == "max_tokens"


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_cancel_between_steps_keeps_what_was_said(engines: Engines, plain: Said, num_steps: int) -> None:
    traffic = engines.open("llama", "itself", DEPTH_4).serve()
    traffic.add(make_request("a", PROMPT, 24, sampling=SAMPLING))
    for _ in range(num_steps):
        traffic.step()
    traffic.cancel("a")
    traffic.run()
    said = traffic.said("a")
    assert said.last.finish_reason == "cancelled"
    assert said.last.token_ids == ()
    assert said.token_ids == plain.token_ids[: 1 + 5 * (num_steps - 1)]
    assert said.last.metrics is not None
    assert said.last.metrics.num_output_tokens == len(said.token_ids)


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("offset", range(0, 14))
def test_stop_words_that_span_tokens_and_steps(engines: Engines, offset: int, length: int) -> None:
    """Every piece of the plain text is a stop word once; printable texts, so that pieces are characters."""
    decode = load_tokenizer(engines.target("llama")).decode
    sampling = replace(SAMPLING, logit_bias=tuple((token, 12.0) for token in range(36, 98)))
    bare = make_request("a", PROMPT, 24, sampling=sampling)
    text = engines.open().serve().run_all([replace(bare, text_stream=TextStream(decode))])["a"].text
    word = text[offset : offset + length]
    request = replace(bare, text_stream=TextStream(decode, [word, "never said"]))
    expected = engines.open().serve().run_all([request])["a"]
    said = serve(engines, replace(bare, text_stream=TextStream(decode, [word, "never said"])))
    assert_said_plainly(said, expected)
    assert said.last.finish_reason == "stop_words"
    assert said.text == expected.text == text[: text.index(word)]
    pieces = [piece for output in said.outputs for piece in output.pieces or ()]
    assert "".join(pieces) == said.text
    assert len(pieces) == len(said.token_ids)


@pytest.mark.parametrize(
    ("drafts", "shape"), [("itself", CHAIN), ("nearly", DYNAMIC), ("eagle1", DYNAMIC), ("medusa", CHAIN)]
)
def test_logits_are_those_of_plain_decoding_to_the_last_bit(engines: Engines, drafts: str, shape: TreeShape) -> None:
    """One row per emitted token and no other, wherever the answer ends; across block and key chunk borders."""
    sampling = [SamplingParameters(), SamplingParameters(0.8, seed=5, frequency_penalty=0.3, top_p=0.9)]
    requests = [
        replace(request, return_logits=True, return_log_probs=index % 3 > 0)
        for index, request in enumerate(
            make_requests(Random(drafts), 10, max_tokens=24, sampling=lambda index: sampling[index % 2])
        )
    ]
    plain = engines.open().serve().run_all(requests)
    traffic = engines.open("llama", drafts, shape).serve(max_num_tokens=96)
    traffic.run_jostling(requests, Random(1))
    for name, expected in plain.items():
        said = traffic.said(name)
        assert_said_plainly(said, expected)
        np.testing.assert_array_equal(logits_of(said), logits_of(expected))
        assert log_probs_of(said) == log_probs_of(expected)
    assert traffic.core.statistics().speculation.num_accepted_tokens > 0


def logits_of(said: Said) -> NDArray[np.float32]:
    for output in said.outputs:
        assert output.logits is not None or not output.token_ids
        if output.logits is not None:
            assert output.logits.shape == (len(output.token_ids), 320)
            assert output.logits.dtype == np.float32
    return np.concatenate([output.logits for output in said.outputs if output.logits is not None])


def log_probs_of(said: Said) -> list[float]:
    for output in said.outputs:
        assert output.log_probs is None or len(output.log_probs) == len(output.token_ids)
    return [value for output in said.outputs for value in output.log_probs or ()]

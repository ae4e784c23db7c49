"""Law 2: the same seed gives the same text, with speculation off, on a chain, and on any tree."""

from __future__ import annotations

from random import Random

import pytest

from draftline.runtime.request import Request, SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import CHAIN, SHAPES, STATIC, assert_said_plainly, make_requests

DRAFTS = ("nearly", "eagle1", "ngram+eagle3", "medusa")


def edited_sampling(temperature: float) -> list[SamplingParameters]:
    """Every field on its own and all together, some with greedy choices."""
    return [
        SamplingParameters(temperature, seed=1),
        SamplingParameters(temperature, top_k=20, top_p=0.9, seed=2),
        SamplingParameters(temperature, top_k=5, seed=2**64 - 1),
        SamplingParameters(temperature, top_p=0.6, seed=3, repetition_penalty=1.3),
        SamplingParameters(temperature, seed=4, presence_penalty=0.8, frequency_penalty=0.3),
        SamplingParameters(temperature, top_k=8, seed=5, bad_words=tuple((token,) for token in range(3, 120))),
        SamplingParameters(temperature, top_k=4, seed=6, bad_words=((41, 235), (206, 41), (32, 15, 206))),
        SamplingParameters(temperature, seed=7, logit_bias=((50, 4.0), (60, 3.5), (70, -9.0)), frequency_penalty=0.1),
        SamplingParameters(
            temperature,
            top_k=30,
            top_p=0.95,
            seed=8,
            repetition_penalty=1.2,
            presence_penalty=0.2,
            frequency_penalty=-0.1,
            min_tokens=8,
            bad_words=((41,), (50, 50), (60, 50, 60)),
            logit_bias=((50, 5.0), (60, 5.0)),
        ),
        SamplingParameters(0.0, repetition_penalty=1.4, frequency_penalty=0.5),
        SamplingParameters(0.0),
    ]


def sampled_requests(temperature: float, number: int) -> list[Request]:
    sampling = edited_sampling(temperature)
    return make_requests(Random(number), len(sampling), max_prompt=130, sampling=lambda index: sampling[index])


@pytest.mark.parametrize("temperature", [0.7, 1.2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_same_seed_gives_the_same_text(engines: Engines, drafts: str, shape: str, temperature: float) -> None:
    """In traffic, with chunked prompts, preemptions and cancels on the one side, and one after another on the other."""
    number = DRAFTS.index(drafts)
    requests = sampled_requests(temperature, number)
    plain = engines.open().serve().run_all(requests)
    num_accepted_tokens = 0
    for schedule in range(3 if shape == "auto" else 1):  # one alone may draft where nothing is accepted
        traffic = engines.open("llama", drafts, SHAPES[shape]).serve(max_num_tokens=64, max_blocks=26)
        statistics = traffic.run_jostling(requests, Random(100 * schedule + number), cancelling=0.1)
        for name, expected in plain.items():
            assert_said_plainly(traffic.said(name), expected)
        num_accepted_tokens += statistics.speculation.num_accepted_tokens
    assert num_accepted_tokens > 0
    assert len({tuple(said.token_ids) for said in plain.values()}) == len(plain)


@pytest.mark.parametrize(("drafts", "shape"), [("nearly", STATIC), ("eagle1", CHAIN)])
def test_the_same_seed_gives_the_same_text_in_int8(engines: Engines, drafts: str, shape: TreeShape) -> None:
    requests = sampled_requests(0.7, 5)
    plain = engines.open(weights_dtype="int8").serve().run_all(requests)
    traffic = engines.open("llama", drafts, shape, weights_dtype="int8").serve(max_num_tokens=64, max_blocks=40)
    traffic.run_jostling(requests, Random(1))
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert traffic.core.statistics().speculation.num_accepted_tokens > 0


def test_edits_of_these_tests_change_the_texts(engines: Engines) -> None:
    requests = sampled_requests(0.7, 0)
    edited = engines.open().serve().run_all(requests)
    for index, request in enumerate(requests):
        sampling = request.sampling
        bare = SamplingParameters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed)
        if sampling == bare:
            continue
        again = Request(request.request_id, request.prompt_ids, request.max_tokens, request.on_output, bare)
        said = engines.open().serve().run_all([again])[str(index)]
        assert said.token_ids[: len(edited[str(index)].token_ids)] != edited[str(index)].token_ids, sampling

"""Rows whose logits hold no distribution: they end their own request, and nobody hears of it but who asked for that."""

from __future__ import annotations

from collections.abc import Sequence as Many
from random import Random
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.acceptance import accept_exact, accept_typical, acceptable_nodes
from draftline.draft_trees import chain_trees
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.text_stream import TextStream
from draftline.speculation import Acceptance
from tests.runtime import test_core, test_speculation
from tests.runtime.fake_session import answer
from tests.runtime.test_core import VOCAB_SIZE, make_request

BROKEN = 7
ERROR = (
    "forward: logits are finite or -inf, one of a row finite; got a row with NaN, inf or no finite one after {} "
    "tokens; check the weights, and their activations for overflow"
)


class Bench(Protocol):
    outputs: dict[str, list[Output]]

    def tokens(self, request_id: str) -> list[int]: ...


def check_said(bench: Bench, requests: Many[Request]) -> list[str]:
    """Every text is the one of a sound model up to the first broken token, and ends in an error behind that alone."""
    reasons = []
    for request in requests:
        said, expected = bench.tokens(request.request_id), answer(request, VOCAB_SIZE)
        last = bench.outputs[request.request_id][-1]
        assert last.finish_reason is not None
        reasons.append(last.finish_reason)
        if BROKEN in request.prompt_ids:
            expected = []
        elif BROKEN in expected[:-1] or (BROKEN in expected and len(expected) < request.max_tokens):
            expected = expected[: expected.index(BROKEN) + 1]
        else:
            assert (last.finish_reason, last.error) == ("max_tokens", None)
            assert said == expected
            continue
        assert said == expected
        assert (last.finish_reason, last.error) == ("error", ERROR.format(len(request.prompt_ids) + len(said)))
        assert last.metrics is not None
        assert last.metrics.num_output_tokens == len(said)
    return reasons


def random_requests(random: Random, count: int, temperature: float) -> list[Request]:
    requests = []
    for index in range(count):
        prompt_ids = [random.randrange(6) for _ in range(random.randint(1, 24))]
        if random.random() < 0.2:
            prompt_ids[random.randrange(len(prompt_ids))] = BROKEN
        sampling = SamplingParameters(temperature, seed=index)
        requests.append(make_request(str(index), prompt_ids, random.randint(1, 30), sampling=sampling))
    return requests


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefix_cache", [True, False])
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_broken_row_ends_its_own_request(prefix_cache: bool, temperature: float, seed: int) -> None:
    """In a pool that is short of blocks: those of who ended are others' at once."""
    random = Random(seed)
    bench = test_core.Bench(max_blocks=16, prefix_cache=prefix_cache)
    bench.session.broken_token = BROKEN
    requests = random_requests(random, 12, temperature)
    for request in requests:
        bench.add(request)
        for _ in range(random.randint(0, 2)):
            bench.step()
            bench.core.check_integrity()
    bench.run()
    check_said(bench, requests)
    assert bench.core.statistics().num_requests_finished == len(requests)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", test_speculation.SHAPES)
@pytest.mark.parametrize("method", test_speculation.METHODS)
def test_speculation_ends_the_same_requests_after_the_same_tokens(method: str, shape: str, temperature: float) -> None:
    random = Random(f"{method} {shape} {temperature}")
    bench = test_speculation.Bench(method, test_speculation.SHAPES[shape], accuracy=0.7, max_blocks=40)
    bench.session.broken_token = BROKEN
    requests = random_requests(random, 24, temperature)
    for request in requests:
        bench.add(request)
        for _ in range(random.randint(0, 3)):
            bench.step()
    bench.run()
    reasons = check_said(bench, requests)
    assert {"error", "max_tokens"} == set(reasons)


def test_a_batch_of_broken_rows_alone() -> None:
    bench = test_speculation.Bench("eagle3")
    bench.session.broken_token = BROKEN
    requests = [make_request(name, [BROKEN, 1], 4) for name in "ab"]
    for request in requests:
        bench.add(request)
    bench.run()
    assert check_said(bench, requests) == ["error", "error"]


def test_text_up_to_the_error_is_shown() -> None:
    bench = test_speculation.Bench("draft_model")
    bench.session.broken_token = BROKEN
    prompt = next([i, j] for i in range(7) for j in range(7) if BROKEN in answer(make_request("", [i, j], 9), 50)[3:])
    request = make_request("a", prompt, 30, text_stream=TextStream(lambda ids: "".join(f"<{i}>" for i in ids), []))
    bench.add(request)
    bench.run()
    check_said(bench, [request])
    text = "".join(output.text or "" for output in bench.outputs["a"])
    assert text == "".join(f"<{token_id}>" for token_id in bench.tokens("a"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nothing_is_accepted_behind_a_row_that_drew_nothing(value: float, temperature: float) -> None:
    trees = chain_trees(np.int32([9]), np.int32([[5, 6, 7]]), np.zeros((1, 3), np.float32), np.array([3]), 0)
    sampled_ids = np.int32([[5, -1, 7, 8]])
    logits = np.full((4, 10), -np.inf, np.float32)
    logits[[0, 2, 3], [5, 7, 8]] = 0
    logits[1] = value
    is_acceptable = acceptable_nodes(trees, logits, sampled_ids, np.float32([temperature]), Acceptance("typical"))
    for accepted in (accept_exact(trees, sampled_ids), accept_typical(trees, sampled_ids, is_acceptable)):
        assert (accepted.paths.tolist(), accepted.bonus_ids.tolist()) == ([[0, 1]], [-1])

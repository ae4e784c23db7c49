"""What drafters keep of the past is the same, however it got there: prefixes found again, chunks, preemptions.

A head or draft model guesses from its own rows alone, so a wrong row shows in what it guesses, where no text tells.
"""

from __future__ import annotations

import pytest

from draftline.runtime.request import SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import CHAIN, STATIC, Said, make_request

DRAFTS = ("nearly", "eagle1", "eagle3", "medusa", "nearly+eagle1")
PROMPT = [(37 * index) % 240 + 3 for index in range(70)]
SAMPLING = SamplingParameters(0.6, seed=8)


def steps_of(said: Said) -> list[tuple[int, ...]]:
    return [output.token_ids for output in said.outputs]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("shape", [CHAIN, STATIC], ids=["chain", "static"])
def test_prefixes_found_again_draft_the_same(engines: Engines, drafts: str, shape: TreeShape) -> None:
    """The second request shares blocks of 8 with the first one's prompt, the third with its answer as well."""
    engine = engines.open("llama", drafts, shape, block_size=8)
    first = make_request("first", PROMPT, 40, sampling=SAMPLING)
    answer = engine.serve(prefix_cache=False).run_all([first])["first"].token_ids
    later = [
        make_request("second", [*PROMPT[:52], 9, 9, 9], 30, sampling=SAMPLING),
        make_request("third", [*PROMPT, *answer[:35]], 30, sampling=SAMPLING),
    ]
    alone = {
        request.request_id: engine.serve(prefix_cache=False).run_all([request])[request.request_id] for request in later
    }
    traffic = engine.serve()
    traffic.run_all([first])
    for request in later:
        before = traffic.core.statistics().num_cached_tokens
        said = traffic.run_all([request])[request.request_id]
        assert traffic.core.statistics().num_cached_tokens >= before + (48 if request is later[0] else 80)
        assert steps_of(said) == steps_of(alone[request.request_id])
    assert any(output.num_accepted_tokens > 0 for said in alone.values() for output in said.outputs)


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("num_rows", [16, 22, 64])
def test_prompts_in_chunks_draft_the_same(engines: Engines, drafts: str, num_rows: int) -> None:
    engine = engines.open("llama", drafts, CHAIN)
    request = make_request("a", PROMPT, 40, sampling=SAMPLING)
    whole = engine.serve().run_all([request])["a"]
    chunked = engine.serve(max_num_tokens=num_rows).run_all([request])["a"]
    assert steps_of(chunked) == steps_of(whole)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_requests_in_a_batch_draft_as_alone(engines: Engines, drafts: str) -> None:
    engine = engines.open("llama", drafts, STATIC)
    requests = [
        make_request(str(index), PROMPT[index : 3 * index + 2], 30, sampling=SamplingParameters(0.7, seed=index))
        for index in (1, 5, 8, 12, 19, 23)
    ]
    together = engine.serve(max_num_tokens=256, prefix_cache=False).run_all(requests)
    for request in requests:
        alone = engine.serve(prefix_cache=False).run_all([request])[request.request_id]
        assert steps_of(together[request.request_id]) == steps_of(alone)


@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_plain_request_leaves_no_hole_in_a_drafters_rows(engines: Engines, drafts: str) -> None:
    """Blocks of a request that never drafted are not for one that drafts: no drafter filled them."""
    engine = engines.open("llama", drafts, CHAIN, block_size=8)
    request = make_request("drafting", PROMPT, 30, sampling=SAMPLING)
    alone = engine.serve().run_all([request])["drafting"]
    traffic = engine.serve()
    traffic.run_all([make_request("plain", PROMPT, 30, sampling=SAMPLING, speculate=False)])
    said = traffic.run_all([request])["drafting"]
    assert said.token_ids == alone.token_ids
    assert "eagle" not in drafts or steps_of(said) == steps_of(alone)

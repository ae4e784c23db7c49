"""Law 4: a draft equal to the target is accepted whole, and a draft that knows nothing changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.runtime.request import SamplingParameters
from draftline.speculation import TreeShape
from tests.laws.conftest import Engines
from tests.laws.traffic import CHAIN, DYNAMIC, STATIC, Said, assert_said_plainly, make_request
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle3

SAMPLED = {
    "greedy": SamplingParameters(),
    "sampled": SamplingParameters(0.9, seed=11),
    "filtered": SamplingParameters(0.9, top_k=30, top_p=0.9, seed=12),
}


def accepted_runs(said: Said) -> list[int]:
    """Accepted draft tokens of every step after the one that ended the prompt."""
    assert len(said.outputs[0].token_ids) == 1
    return [output.num_accepted_tokens for output in said.outputs[1:]]


@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("depth", [1, 2, 4, 7])
@pytest.mark.parametrize("num_prompt_tokens", [2, 15, 16, 120, 140])
def test_a_chain_of_the_target_itself_is_accepted_whole(
    engines: Engines, num_prompt_tokens: int, depth: int, sampling: str
) -> None:
    """6 whole runs: across blocks of 16 and the 128 positions of a key chunk, behind one chunk of prompt and two."""
    engine = engines.open("llama", "itself", TreeShape("chain", depth + 1, depth, 1))
    prompt = [(7 * index) % 250 + 3 for index in range(num_prompt_tokens)]
    request = make_request("a", prompt, 1 + 6 * (depth + 1), sampling=SAMPLED[sampling])
    said = engine.serve(max_num_tokens=64).run_all([request])["a"]
    assert accepted_runs(said) == [depth] * 6
    metrics = said.last.metrics
    assert metrics is not None
    assert metrics.speculation.acceptance_length == depth + 1
    assert metrics.speculation.acceptance_rate == 1.0
    assert metrics.speculation.num_emitted_tokens == 6 * (depth + 1)
    assert_said_plainly(said, engines.open().serve().run_all([request])["a"])


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_trees_of_the_target_itself_hold_its_next_tokens(engines: Engines, shape: TreeShape, sampling: str) -> None:
    """A branching tree spends nodes on the second best, so its deepest runs are shorter; the first is always there."""
    engine = engines.open("llama", "itself", shape)
    requests = [
        make_request(str(index), [index + 3, 50, 60 + index], 40, sampling=SAMPLED[sampling]) for index in range(4)
    ]
    said = engine.serve().run_all(requests)
    plain = engines.open().serve().run_all(requests)
    for name, expected in plain.items():
        assert_said_plainly(said[name], expected)
        runs = accepted_runs(said[name])
        assert min(runs[:-1]) >= 1
        assert max(runs) >= 3


def test_a_perfect_draft_stays_perfect_through_preemptions_and_shared_prefixes(engines: Engines) -> None:
    """Wherever its rows came from, all that was proposed is accepted."""
    requests = [
        make_request(str(index), [*range(3, 40), 50 + index % 3, *range(60, 60 + index)], 60) for index in range(10)
    ]
    traffic = engines.open("llama", "itself", CHAIN).serve(max_batch_size=6, max_blocks=16, max_num_tokens=40)
    traffic.run_all(requests)
    statistics = traffic.core.statistics()
    plain = engines.open().serve().run_all(requests)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    numbers = statistics.speculation
    assert statistics.num_preemptions >= 3
    assert statistics.num_cached_tokens > 100
    assert numbers.num_accepted_tokens == numbers.num_verified_tokens > 300


@pytest.mark.parametrize("sampling", SAMPLED)
def test_drafts_that_know_nothing_change_nothing(engines: Engines, tmp_path: Path, sampling: str) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", seed=99)
    head = write_tiny_eagle3(tmp_path / "head", engines.target("llama"), seed=99)
    engine = engines.open("llama", "", DYNAMIC, extra=(("draft_model", model), ("eagle3", head)))
    requests = [
        make_request(str(index), [index + 3, 50, 60 + index], 40, sampling=SAMPLED[sampling]) for index in range(8)
    ]
    traffic = engine.serve()
    said = traffic.run_all(requests)
    plain = engines.open().serve().run_all(requests)
    for name, expected in plain.items():
        assert_said_plainly(said[name], expected)
    assert traffic.core.statistics().speculation.acceptance_rate < 0.03

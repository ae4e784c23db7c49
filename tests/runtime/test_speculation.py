"""Speculation in the step loop, on a target and drafters that notice every wrong slot, row, token and feature."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from random import Random

import pytest

from draftline.runtime.core import EngineCore
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.drafters.building import DrafterSetup, Speculation
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.speculation import TreeShape
from draftline.tree_growth import needed_candidates
from tests.runtime.fake_draft_session import FakeDraftSession
from tests.runtime.fake_session import FakeSession, answer

VOCAB_SIZE = 50
CHAIN = TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)
STATIC = TreeShape("static", 8, 3, 1, choices=((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
DYNAMIC = TreeShape("dynamic", max_nodes=12, max_depth=4, top_k=3)
AUTO = TreeShape("auto", max_nodes=12, max_depth=4, top_k=3)
SHAPES = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC, "auto": AUTO}
METHODS = ("eagle3", "draft_model", "ngram", "ngram+eagle3", "draft_model+eagle1")


def ignore(output: Output) -> None:
    pass


@dataclass
class Bench:
    """A core that speculates, and all that it emitted."""

    method: str = "eagle3"
    shape: TreeShape = CHAIN
    accuracy: float = 1.0
    max_positions: int = 0
    max_batch_size: int = 4
    max_seq_len: int = 96
    max_num_tokens: int = 32
    block_size: int = 4
    max_blocks: int = 96
    key_chunk: int = 16
    prefix_cache: bool = True
    vocab_size: int = VOCAB_SIZE
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    draft_sessions: list[FakeDraftSession] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = (self.max_batch_size, self.max_seq_len, self.max_num_tokens, self.block_size, self.max_blocks)
        self.limits = EngineLimits(*sizes)
        self.session = FakeSession(
            num_blocks=self.max_blocks,
            block_size=self.block_size,
            vocab_size=self.vocab_size,
            max_num_tokens=self.max_num_tokens,
            key_chunk=self.key_chunk,
        )
        sources = tuple(self.source(method) for method in self.method.split("+"))
        speculation = Speculation(sources, self.shape)
        policy = SpeculationPolicy(self.shape, CostCurve([1, 64], [10.0, 20.0]), len(sources))
        self.core = EngineCore(
            self.session, self.limits, prefix_cache=self.prefix_cache, speculation=speculation, policy=policy
        )

    def source(self, method: str) -> DrafterSetup:
        if method == "ngram":
            return DrafterSetup(method)
        session = FakeDraftSession(
            self.session,
            num_blocks=self.max_blocks,
            block_size=self.block_size,
            num_candidates=needed_candidates(self.shape),
            is_head=method != "draft_model",
            accuracy=self.accuracy,
            max_positions=self.max_positions or 10**6,
        )
        self.draft_sessions.append(session)
        return DrafterSetup(method, session, self.max_positions)

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.core.add(Sequence(request, check_request(request, self.limits), time.time_ns()))

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, emissions: list[tuple[Sequence, Output]]) -> None:
        for _, output in emissions:
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        while not self.core.is_idle:
            self.step()
        self.core.check_integrity()
        assert self.core.statistics().num_blocks_free == self.max_blocks

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]


def make_request(request_id: str, prompt_ids: list[int], max_tokens: int, **fields: object) -> Request:
    return Request(request_id, prompt_ids, max_tokens, ignore, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_plain_decoding(method: str, shape: str, temperature: float) -> None:
    random = Random(f"{method} {shape} {temperature}")
    bench = Bench(method, SHAPES[shape], accuracy=0.6)
    requests = []
    for index in range(12):
        prompt_ids = [random.randrange(6) for _ in range(random.randint(1, 40))]
        sampling = SamplingParameters(temperature, seed=index)
        requests.append(make_request(str(index), prompt_ids, random.randint(1, 40), sampling=sampling))
        bench.add(requests[-1])
        for _ in range(random.randint(0, 3)):
            bench.step()
    bench.run()
    for request in requests:
        assert bench.tokens(request.request_id) == answer(request, VOCAB_SIZE)


# Only draft models draw with the target's random numbers.
@pytest.mark.parametrize(("method", "temperature"), [("eagle3", 0.0), ("draft_model", 0.0), ("draft_model", 0.8)])
@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 31, 70])
def test_a_perfect_draft_is_accepted_whole(method: str, temperature: float, num_prompt_tokens: int) -> None:
    """Also behind chunked prefill (32 tokens a step) and across blocks of 4 and key chunks of 16."""
    bench = Bench(method, CHAIN)
    request = make_request(
        "a", [index % 7 for index in range(num_prompt_tokens)], 21, sampling=SamplingParameters(temperature, seed=3)
    )
    bench.add(request)
    bench.run()
    assert bench.tokens("a") == answer(request, VOCAB_SIZE)
    metrics = bench.outputs["a"][-1].metrics
    assert metrics is not None
    assert metrics.speculation.acceptance_length == 5.0
    assert metrics.speculation.histogram == (0, 0, 0, 0, 4)
    assert [output.num_accepted_tokens for output in bench.outputs["a"]] == [0, 4, 4, 4, 4]
    assert metrics.speculation.num_emitted_tokens == 20


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "draft_model+eagle3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_perfect_draft_stays_perfect_in_traffic(method: str, shape: str) -> None:
    """Joins, shared prefixes, preemptions: wherever the drafter's rows came from, they are right."""
    random = Random(f"{method} {shape}")
    bench = Bench(method, SHAPES[shape], max_blocks=40)
    requests = [
        make_request(str(index), [1, 2, 3, 4, 5, 6, 7, 8][: random.randint(1, 8)] + [index % 3] * 9, 30)
        for index in range(14)
    ]
    for request in requests:
        bench.add(request)
        bench.step()
    bench.run()
    for request in requests:
        assert bench.tokens(request.request_id) == answer(request, VOCAB_SIZE)
        metrics = bench.outputs[request.request_id][-1].metrics
        assert metrics is not None
        if shape != "auto":
            # Every step accepts all depths that were allowed, so no draft on the greedy path is refused.
            assert metrics.speculation.num_accepted_tokens > 0
    statistics = bench.core.statistics()
    assert statistics.num_cached_tokens > 0
    if shape == "chain":
        assert statistics.speculation.num_accepted_tokens == statistics.speculation.num_verified_tokens


def test_beyond_the_drafts_positions_decoding_goes_on() -> None:
    for method in ("eagle3", "draft_model"):
        for max_positions in (1, 5, 20, 33, 40):
            bench = Bench(method, DYNAMIC, max_positions=max_positions)
            requests = [make_request(str(n), [n] * n, 30) for n in (1, 3, 19, 35)]
            for request in requests:
                bench.add(request)
            bench.run()
            for request in requests:
                assert bench.tokens(request.request_id) == answer(request, VOCAB_SIZE)
            accepted = bench.core.statistics().speculation.num_accepted_tokens
            assert accepted > 0 or max_positions == 1


def test_the_longest_request_ends_at_max_seq_len() -> None:
    for num_prompt_tokens in range(80, 96):
        bench = Bench("draft_model", DYNAMIC)
        request = make_request("a", [3] * num_prompt_tokens, 96 - num_prompt_tokens)
        bench.add(request)
        bench.run()
        assert bench.tokens("a") == answer(request, VOCAB_SIZE)


@pytest.mark.parametrize("offset", range(9))
def test_an_end_id_ends_the_answer_at_every_offset_of_a_run(offset: int) -> None:
    plain = answer(make_request("a", [5, 6], 20), VOCAB_SIZE)
    end_id = plain[offset]
    bench = Bench("eagle3", CHAIN)
    bench.add(make_request("a", [5, 6], 20, end_ids=frozenset({end_id})))
    bench.run()
    assert bench.tokens("a") == plain[: plain.index(end_id)]
    assert bench.outputs["a"][-1].finish_reason == "end_id"
    metrics = bench.outputs["a"][-1].metrics
    assert metrics is not None
    assert metrics.num_output_tokens == plain.index(end_id)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_ends_the_answer_at_every_offset_of_a_run(max_tokens: int) -> None:
    bench = Bench("eagle3", CHAIN)
    request = make_request("a", [5, 6], max_tokens)
    bench.add(request)
    bench.run()
    assert bench.tokens("a") == answer(request, VOCAB_SIZE)
    assert bench.outputs["a"][-1].finish_reason == "max_tokens"


def test_requests_choose_how_much_to_speculate() -> None:
    bench = Bench("eagle3", CHAIN)
    bench.add(make_request("off", [5, 6], 13, speculate=False))
    bench.add(make_request("two", [5, 6], 13, max_draft_tokens=2))
    bench.add(make_request("all", [5, 6], 13))
    bench.run()
    lengths = {}
    for name in ("off", "two", "all"):
        metrics = bench.outputs[name][-1].metrics
        assert metrics is not None
        lengths[name] = metrics.speculation.acceptance_length
        assert bench.tokens(name) == answer(make_request("a", [5, 6], 13), VOCAB_SIZE)
    assert lengths == {"off": 1.0, "two": 3.0, "all": pytest.approx(13 / 3, abs=0.4)}


def test_who_waits_for_blocks_takes_no_rows_from_trees() -> None:
    bench = Bench("eagle3", DYNAMIC, max_num_tokens=16, max_blocks=12)
    bench.add(make_request("runs", [1] * 20, 24))
    bench.add(make_request("waits", [2] * 30, 8))
    num_nodes = []
    while not bench.outputs["runs"] or bench.outputs["runs"][-1].finish_reason is None:
        bench.step()
        if bench.outputs["runs"] and bench.session.last is not None:
            num_nodes.append(len(bench.session.last.input_ids))
    assert max(num_nodes[2:]) == DYNAMIC.max_nodes  # not 8, half of the rows
    bench.run()
    assert bench.tokens("waits") == answer(make_request("waits", [2] * 30, 8), VOCAB_SIZE)


def test_ten_thousand_events_lose_no_block() -> None:
    """Submits, steps and cancels at random, on too few blocks: everybody gets the plain text, and no block is lost."""
    random = Random(5)
    shape = TreeShape("dynamic", max_nodes=6, max_depth=3, top_k=2)
    bench = Bench("ngram+eagle3", shape, accuracy=0.6, max_blocks=20)
    active: dict[str, Request] = {}
    for event in range(10_000):
        choice, emissions = random.random(), []
        if choice < 0.25 and len(active) < 5:
            prompt_ids = [random.randrange(4) for _ in range(random.randint(1, 30))]
            end_ids = frozenset({random.randrange(VOCAB_SIZE)})
            active[str(event)] = make_request(str(event), prompt_ids, random.randint(1, 40), end_ids=end_ids)
            bench.add(active[str(event)])
        elif choice < 0.28 and active:
            emissions = bench.core.cancel(random.choice(list(active)))
        else:
            emissions = bench.core.step()
        bench.record(emissions)
        if event % 100 == 0:
            bench.core.check_integrity()
        for _, output in emissions:
            if output.finish_reason:
                tokens, expected = bench.tokens(output.request_id), answer(active.pop(output.request_id), VOCAB_SIZE)
                assert tokens == expected or (output.finish_reason == "cancelled" and tokens == expected[: len(tokens)])
    bench.run()
    statistics = bench.core.statistics()
    assert statistics.num_preemptions > 100
    assert statistics.num_cached_tokens > 1000
    assert statistics.speculation.num_accepted_tokens > 1000

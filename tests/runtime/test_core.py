"""The step loop without threads, on a session that notices every wrong slot."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.runtime.core import EngineCore
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.sequence import Sequence
from draftline.runtime.text_stream import TextStream
from draftline.sessions.protocol import StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, answer

VOCAB_SIZE = 50


def ignore(output: Output) -> None:
    pass


def make_request(request_id: str, prompt_ids: list[int], max_tokens: int, **fields: object) -> Request:
    return Request(request_id, prompt_ids, max_tokens, ignore, **fields)  # type: ignore[arg-type]


@dataclass
class Bench:
    """A core with a fake session, and all that it emitted."""

    max_batch_size: int = 4
    max_seq_len: int = 64
    max_num_tokens: int = 8
    block_size: int = 4
    max_blocks: int = 64
    prefix_cache: bool = True
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = (self.max_batch_size, self.max_seq_len, self.max_num_tokens, self.block_size, self.max_blocks)
        self.limits = EngineLimits(*sizes)
        self.session = FakeSession(
            num_blocks=self.max_blocks,
            block_size=self.block_size,
            vocab_size=VOCAB_SIZE,
            max_num_tokens=self.max_num_tokens,
        )
        self.core = EngineCore(self.session, self.limits, prefix_cache=self.prefix_cache)

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.core.add(Sequence(request, check_request(request, self.limits), time.time_ns()))

    def step(self) -> None:
        self.record(self.core.step())

    def record(self, emissions: list[tuple[Sequence, Output]]) -> None:
        for _, output in emissions:
            assert not self.finish_reason(output.request_id), "nothing follows the last output"
            self.outputs[output.request_id].append(output)

    def run(self) -> None:
        while not self.core.is_idle:
            self.step()
        self.check_all_free()

    def check_all_free(self) -> None:
        self.core.check_integrity()
        assert self.core.statistics().num_blocks_free == self.max_blocks

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for output in self.outputs[request_id] for token_id in output.token_ids]

    def text(self, request_id: str) -> str:
        return "".join(output.text or "" for output in self.outputs[request_id])

    def finish_reason(self, request_id: str) -> str | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_request(num_prompt_tokens: int, temperature: float) -> None:
    bench = Bench()
    sampling = SamplingParameters(temperature, seed=2**64 - 1)
    request = make_request("a", list(range(num_prompt_tokens)), 12, sampling=sampling)
    bench.add(request)
    bench.run()
    assert bench.tokens("a") == answer(request, VOCAB_SIZE)
    assert bench.finish_reason("a") == "max_tokens"
    assert bench.session.num_forwards == -(-num_prompt_tokens // 8) + 11
    metrics = bench.outputs["a"][-1].metrics
    assert metrics is not None
    assert (metrics.num_input_tokens, metrics.num_output_tokens) == (num_prompt_tokens, 12)
    assert metrics.kv_cache_alloc_total_blocks == -(-(num_prompt_tokens + 11) // 4)
    assert metrics.arrival_time_ns <= metrics.first_scheduled_time_ns <= metrics.first_token_time_ns
    assert metrics.first_token_time_ns <= metrics.last_token_time_ns


def test_the_seed_decides_a_sampled_answer() -> None:
    bench = Bench()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        bench.add(make_request(name, [1, 2, 3], 8, sampling=SamplingParameters(1.0, seed=seed)))
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") != bench.tokens("c")


def test_the_end_id_is_not_emitted_but_told() -> None:
    plain = answer(make_request("a", [5, 6], 10), VOCAB_SIZE)
    bench = Bench()
    bench.add(make_request("a", [5, 6], 10, end_ids=frozenset({plain[4], VOCAB_SIZE + 1})))
    bench.add(make_request("b", [5, 6], 10))
    bench.run()
    assert bench.tokens("a") == plain[: plain.index(plain[4])]
    assert bench.finish_reason("a") == "end_id"
    assert bench.outputs["a"][-1].token_ids == ()
    assert [output.end_id for output in bench.outputs["a"]] == [None] * plain.index(plain[4]) + [plain[4]]
    assert {output.end_id for output in bench.outputs["b"]} == {None}


def spell(token_ids: object) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)  # type: ignore[attr-defined]


def test_a_stop_word_ends_the_answer_at_the_token_that_completes_it() -> None:
    plain = answer(make_request("a", [5, 6], 10), VOCAB_SIZE)
    stop_word = f"{plain[3]}><{plain[4]}"
    bench = Bench()
    bench.add(make_request("a", [5, 6], 10, text_stream=TextStream(spell, [stop_word])))
    bench.run()
    assert bench.tokens("a") == plain[:5]
    assert bench.text("a") == spell(plain[:3]) + "<"
    assert bench.finish_reason("a") == "stop_words"


def test_held_text_is_flushed_at_the_end() -> None:
    request = make_request("a", [5, 6], 4, text_stream=TextStream(spell, [">never"]))
    bench = Bench()
    bench.add(request)
    bench.run()
    assert bench.text("a") == spell(answer(request, VOCAB_SIZE))


def test_decode_never_waits_for_prefill() -> None:
    bench = Bench(max_num_tokens=8)
    bench.add(make_request("short", [1, 2], 20))
    bench.step()
    bench.add(make_request("long", list(range(40)), 4))
    for _ in range(6):
        bench.step()
    assert len(bench.tokens("short")) == 7, "one token in each step"
    assert len(bench.tokens("long")) == 1, "40 tokens in chunks of 7"
    bench.run()


def test_the_prefix_is_shared_and_the_last_token_is_computed_again() -> None:
    bench = Bench(max_num_tokens=32)
    prompt = list(range(16))
    bench.add(make_request("a", prompt, 5))
    bench.run()
    bench.session.keep_batches = True
    bench.add(make_request("b", prompt, 5))
    bench.run()
    assert bench.tokens("a") == bench.tokens("b")
    first = bench.session.batches[0]
    assert (first.context_lengths.tolist(), first.input_ids.tolist()) == ([12], [12, 13, 14, 15])
    metrics = bench.outputs["b"][-1].metrics
    assert metrics is not None
    assert metrics.kv_cache_reused_blocks == 3
    assert bench.core.statistics().num_cached_tokens == 12


def test_generated_tokens_are_shared_with_the_next_turn() -> None:
    bench = Bench(max_num_tokens=32)
    bench.add(make_request("a", list(range(8)), 9))
    bench.run()
    bench.add(make_request("b", [*range(8), *bench.tokens("a"), 1, 2, 3], 3))
    bench.run()
    assert bench.core.statistics().num_cached_tokens == 16


def test_equal_prompts_at_once_end_up_on_the_same_blocks() -> None:
    bench = Bench(max_num_tokens=64)
    for name in "abcd":
        bench.add(make_request(name, list(range(12)), 5))
    bench.step()
    assert bench.core.statistics().num_blocks_used == 3
    bench.step()
    bench.core.check_integrity()
    bench.run()
    assert bench.tokens("a") == bench.tokens("b") == bench.tokens("c") == bench.tokens("d")


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preemption_changes_no_answer(prefix_cache: bool) -> None:
    bench = Bench(max_blocks=9, prefix_cache=prefix_cache)
    requests = [make_request(name, [index, 7, 7], 25) for index, name in enumerate("abc")]
    for request in requests:
        bench.add(request)
    bench.run()
    assert bench.core.statistics().num_preemptions > 0
    for request in requests:
        assert bench.tokens(request.request_id) == answer(request, VOCAB_SIZE)


def test_a_failed_forward_ends_the_running_requests_only() -> None:
    bench = Bench(max_batch_size=2)
    requests = [make_request(name, [index, 1, 2], 6) for index, name in enumerate("abc")]
    for request in requests:
        bench.add(request)
    bench.step()
    bench.session.failures.append(RuntimeError("no memory"))
    bench.step()
    assert [bench.finish_reason(name) for name in "abc"] == ["error", "error", None]
    assert bench.outputs["a"][-1].error == "forward: no memory"
    bench.run()
    assert bench.tokens("c") == answer(requests[2], VOCAB_SIZE)


def test_the_first_request_is_not_overtaken() -> None:
    bench = Bench(max_blocks=10)
    bench.add(make_request("a", [1] * 20, 12))
    bench.step()
    bench.add(make_request("big", [2] * 24, 4))
    bench.add(make_request("small", [3], 2))
    for _ in range(5):
        bench.step()
    assert bench.core.statistics().num_requests_waiting == 2
    bench.run()
    assert bench.finish_reason("small") == "max_tokens"


def test_a_cancelled_head_lets_the_next_one_in_at_once() -> None:
    bench = Bench(max_blocks=10)
    bench.add(make_request("a", [1] * 20, 12))
    bench.add(make_request("big", [2] * 24, 4))
    bench.add(make_request("small", [3], 2))
    for _ in range(4):
        bench.step()
    bench.record(bench.core.cancel("big"))
    bench.step()
    assert len(bench.tokens("small")) == 1
    bench.run()


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    bench = Bench(max_blocks=8, max_num_tokens=64)
    bench.add(make_request("a", [1] * 15, 6))
    bench.add(make_request("b", [2] * 13, 4))
    bench.step()
    assert bench.core.statistics().num_requests_waiting == 1
    bench.run()
    assert bench.core.statistics().num_preemptions == 0


small_prompts = st.lists(st.integers(0, 2), min_size=1, max_size=20)
temperatures = st.sampled_from([0.0, 0.8])
submissions = st.tuples(small_prompts, st.integers(1, 18), temperatures, st.integers(0, 3), st.booleans())
events = st.lists(st.one_of(submissions, st.just("step"), st.just("step"), st.integers(0, 60)), max_size=70)


def check_arrivals_in_order(core: EngineCore) -> None:
    sequences = (*core.scheduler.running, *core.scheduler.waiting)
    arrivals = [int(sequence.request.request_id[1:]) for sequence in sequences]
    assert arrivals == sorted(arrivals), "nobody is overtaken"


def play(bench: Bench, events: Iterable[object]) -> None:
    """Submit on a tuple, cancel on a number, step on anything else; check every law after every event."""
    requests: list[Request] = []
    for event in events:
        if isinstance(event, tuple):
            prompt_ids, max_tokens, temperature, seed, ends = event
            end_ids = frozenset(range(3, 9)) if ends else frozenset()
            sampling = SamplingParameters(temperature, seed=seed)
            name = f"r{len(requests)}"
            requests.append(make_request(name, prompt_ids, max_tokens, sampling=sampling, end_ids=end_ids))
            bench.add(requests[-1])
        elif isinstance(event, int):
            bench.record(bench.core.cancel(f"r{event}"))
        else:
            bench.step()
        bench.core.check_integrity()
        check_arrivals_in_order(bench.core)
    bench.run()
    for request in requests:
        tokens, expected = bench.tokens(request.request_id), answer(request, VOCAB_SIZE)
        if bench.finish_reason(request.request_id) == "cancelled":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected


@settings(max_examples=100, deadline=None)
@given(events, st.integers(1, 5), st.integers(0, 12), st.sampled_from([1, 2, 4]), st.integers(0, 20), st.booleans())
def test_every_answer_is_the_one_given_alone(
    events: list[object], max_batch_size: int, extra_tokens: int, block_size: int, extra_blocks: int, prefix_cache: bool
) -> None:
    """Any order of submissions, cancellations and steps, in pools just large enough for the longest request."""
    bench = Bench(
        max_batch_size=max_batch_size,
        max_seq_len=40,
        max_num_tokens=max_batch_size + extra_tokens,
        block_size=block_size,
        max_blocks=-(-38 // block_size) + extra_blocks,
        prefix_cache=prefix_cache,
    )
    play(bench, events)


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_events_under_pressure(seed: int) -> None:
    """Long runs with nested prefixes, cancellations and a pool that is always short of blocks."""
    random = Random(seed)
    bench = Bench(max_batch_size=6, max_num_tokens=12, block_size=1 + seed, max_blocks=-(-54 // (1 + seed)))
    document = [random.randrange(3) for _ in range(24)]
    events: list[object] = []
    num_requests = 0
    for _ in range(2500):
        draw = random.random()
        if draw < 0.12:
            prompt_ids = document[: random.choice((1, 3, 8, 24))] + [random.randrange(3)] * random.randint(0, 4)
            temperature, sampling_seed = 0.8 * random.getrandbits(1), random.randrange(3)
            events.append((prompt_ids, random.randint(1, 27), temperature, sampling_seed, draw < 0.03))
            num_requests += 1
        elif draw < 0.14 and num_requests:
            events.append(max(0, num_requests - random.randint(1, 12)))
        else:
            events.append("step")
    play(bench, events)
    statistics = bench.core.statistics()
    assert statistics.num_requests_finished == num_requests
    assert statistics.num_preemptions > 0
    assert statistics.num_cached_tokens > 0


class NullSession:
    """An engine that takes no time."""

    key_chunk, num_blocks = 0, 1

    def forward(self, batch: StepBatch) -> StepResult:
        return StepResult(np.ones(batch.sample_rows.size, dtype=np.int32))

    def commit(self, rows: object, slots: object) -> None:
        pass

    def close(self) -> None:
        pass


def test_the_host_takes_less_than_a_millisecond_per_step() -> None:
    limits = EngineLimits(16, 4096, 512, 16, 4096)
    core = EngineCore(NullSession(), limits, prefix_cache=True)
    for index in range(16):
        request = make_request(f"{index}", [index] * 1500, 2000)
        core.add(Sequence(request, check_request(request, limits), 0))
    while core.statistics().num_generated_tokens < 100:
        core.step()
    milliseconds = []
    for _ in range(100):
        start = time.perf_counter()
        core.step()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    assert np.median(milliseconds) < 1.0

"""The engine's thread: submission and cancellation from outside, and what happens when something breaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from draftline.errors import RequestError
from draftline.runtime.engine import Engine
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.sessions.protocol import StepBatch, StepResult
from tests.runtime.fake_session import FakeSession, answer

VOCAB_SIZE = 50
MAX_BLOCKS = 40


class Collector:
    """A client: collects outputs and can wait for the last one."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.first = threading.Event()
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.first.set()
        if output.finish_reason is not None:
            self.done.set()

    def last(self) -> Output:
        assert self.done.wait(10), "the request never ended"
        return self.outputs[-1]

    def tokens(self) -> list[int]:
        self.last()
        return [token_id for output in self.outputs for token_id in output.token_ids]


class GatedSession(FakeSession):
    """A fake session whose forwards wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__(num_blocks=MAX_BLOCKS, block_size=4, vocab_size=VOCAB_SIZE, max_num_tokens=16)
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, batch: StepBatch) -> StepResult:
        assert self.gate.wait(10)
        return super().forward(batch)


@contextmanager
def serving(session: GatedSession) -> Iterator[Engine]:
    before = set(threading.enumerate())
    engine = Engine(
        session,
        max_batch_size=4,
        max_seq_len=128,
        max_num_tokens=16,
        block_size=4,
        max_blocks=MAX_BLOCKS,
        prefix_cache=True,
        vocab_size=VOCAB_SIZE,
    )
    try:
        yield engine
    finally:
        session.gate.set()
        engine.close()
        left = set(threading.enumerate()) - before
        assert not any(thread.name == "draftline-engine" for thread in left)


def make_request(
    name: str, collector: Collector, *, prompt_ids: list[int] | None = None, max_tokens: int = 8
) -> Request:
    return Request(name, prompt_ids or [1, 2, 3], max_tokens, collector)


def test_many_clients_get_the_answers_they_get_alone() -> None:
    results: dict[str, tuple[Request, Collector]] = {}
    with serving(GatedSession()) as engine:

        def client(number: int) -> None:
            for turn in range(4):
                collector = Collector()
                name = f"{number}-{turn}"
                request = make_request(name, collector, prompt_ids=[number % 3] * (5 + 9 * turn), max_tokens=6 + number)
                request = replace(request, sampling=SamplingParameters(0.8 * (number % 2), seed=number))
                results[name] = request, collector
                engine.submit(request)
                collector.last()

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statistics = engine.statistics()
    assert len(results) == 32
    for request, collector in results.values():
        assert collector.tokens() == answer(request, VOCAB_SIZE)
    assert (statistics.num_requests_active, statistics.num_requests_finished) == (0, 32)
    assert (statistics.num_blocks_used, statistics.num_blocks_free) == (0, MAX_BLOCKS)
    assert statistics.num_generated_tokens == sum(len(collector.tokens()) for _, collector in results.values())


def test_sixteen_clients_among_them_a_long_prompt_and_a_cancelled_one() -> None:
    session = FakeSession(num_blocks=320, block_size=16, vocab_size=VOCAB_SIZE, max_num_tokens=512)
    collectors = [Collector() for _ in range(16)]
    requests = [
        Request(
            f"{number}",
            [number] * (4000 if number == 5 else 1 + 31 * number),
            8 + number if number != 11 else 2000,
            collector,
            SamplingParameters(0.8 * (number % 2), seed=number),
        )
        for number, collector in enumerate(collectors)
    ]
    sizes = {"max_batch_size": 16, "max_seq_len": 4352, "max_num_tokens": 512, "block_size": 16, "max_blocks": 320}
    with closing(Engine(session, prefix_cache=True, **sizes)) as engine:
        for request in requests:
            engine.submit(request)
        assert collectors[11].first.wait(10)
        engine.cancel("11")
        for request, collector in zip(requests, collectors, strict=True):
            if request.request_id == "11":
                assert collector.last().finish_reason == "cancelled"
            else:
                assert collector.tokens() == answer(request, VOCAB_SIZE)
        assert engine.statistics().num_blocks_free == 320


def test_cancelling_running_and_waiting_requests() -> None:
    session, collectors = GatedSession(), [Collector() for _ in range(6)]
    with serving(session) as engine:
        session.gate.clear()
        for number, collector in enumerate(collectors):
            engine.submit(make_request(f"{number}", collector, max_tokens=50))
        assert engine.statistics().num_requests_active == 6
        assert engine.cancel("0")
        assert engine.cancel("5")
        session.gate.set()
        assert collectors[0].last().finish_reason == collectors[5].last().finish_reason == "cancelled"
        assert collectors[5].tokens() == []
        assert not engine.cancel("5")
        for number in range(1, 5):
            assert collectors[number].last().finish_reason == "max_tokens"
        assert engine.statistics().num_blocks_used == 0


def test_an_active_id_is_refused_and_a_finished_one_is_free_again() -> None:
    session, first, second = GatedSession(), Collector(), Collector()
    with serving(session) as engine:
        session.gate.clear()
        engine.submit(make_request("a", first))
        with pytest.raises(RequestError, match="request_id: must differ from every active request's; got a; "):
            engine.submit(make_request("a", second))
        session.gate.set()
        first.last()
        engine.submit(make_request("a", second))
        assert second.tokens() == first.tokens()


def test_an_id_can_be_used_again_from_the_last_callback() -> None:
    second = Collector()
    with serving(GatedSession()) as engine:

        def submit_again(output: Output) -> None:
            if output.finish_reason is not None:
                engine.submit(make_request("a", second))

        engine.submit(Request("a", [1], 2, submit_again))
        assert second.last().finish_reason == "max_tokens"


def test_outputs_of_a_step_are_handed_out_in_order_of_arrival() -> None:
    session, order, last = GatedSession(), [], Collector()

    def note(output: Output) -> None:
        order.append(output.request_id)

    with serving(session) as engine:
        session.gate.clear()
        engine.submit(Request("first", [0], 1, note))
        for name in "abc":
            engine.submit(Request(name, [1, 2], 3, note))
        session.gate.set()
        engine.submit(make_request("last", last, max_tokens=9))
        last.last()
    assert order == ["first", *"abc" * 3]


def test_closing_ends_everything_as_cancelled() -> None:
    session, collectors = GatedSession(), [Collector() for _ in range(6)]
    with serving(session) as engine:
        session.gate.clear()
        for number, collector in enumerate(collectors):
            engine.submit(make_request(f"{number}", collector, max_tokens=100))
        closer = threading.Thread(target=engine.close)
        closer.start()
        session.gate.set()
        closer.join()
        assert {collector.last().finish_reason for collector in collectors} == {"cancelled"}
        with pytest.raises(RequestError, match="engine: must be open; got closed"):
            engine.submit(make_request("late", Collector()))
        assert engine.statistics().num_blocks_used == 0


def test_a_failed_forward_leaves_a_working_engine() -> None:
    session, first, second = GatedSession(), Collector(), Collector()
    with serving(session) as engine:
        session.failures.append(RuntimeError("device lost"))
        engine.submit(make_request("a", first))
        assert first.last().finish_reason == "error"
        assert first.last().error == "forward: device lost"
        engine.submit(make_request("b", second))
        assert second.last().finish_reason == "max_tokens"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", ["callback", "forward", "integrity"])
def test_a_bug_stops_the_engine_and_everybody_hears_of_it(fault: str) -> None:
    session, waiting = GatedSession(), [Collector() for _ in range(6)]

    def broken(output: Output) -> None:
        if fault == "callback":
            raise KeyError("a broken callback")

    with serving(session) as engine:
        session.gate.clear()
        engine.submit(Request("broken", [1, 2], 3, broken))
        if fault != "integrity":
            for number, collector in enumerate(waiting):
                engine.submit(make_request(f"{number}", collector, max_tokens=90))
        if fault == "forward":
            session.failures.append(KeyError("a bug in the session"))
        if fault == "integrity":
            engine._core.scheduler.pool._reference_counts[7] += 1
        session.gate.set()
        engine._thread.join(10)
        assert not engine._thread.is_alive()
        if fault != "integrity":
            assert {collector.last().finish_reason for collector in waiting} == {"error"}
            assert all("engine stopped: KeyError" in str(collector.last().error) for collector in waiting)
        with pytest.raises(RequestError, match="engine: must be running; got stopped by"):
            engine.submit(make_request("late", Collector()))

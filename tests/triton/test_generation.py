"""The service between Triton and the engine, with both played by the test."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import RequestError
from draftline.runtime.request import Metrics, Output
from draftline.runtime.speculation_numbers import NO_SPECULATION, SpeculationNumbers
from draftline.triton.generation import GenerationService
from draftline.triton.generation_request import ServedModel
from tests.tiny_checkpoints import NUM_TOKENS, write_tiny_checkpoint

FINAL = 1
METRICS = Metrics(3, 2, 10, 11, 12, 13, 4, 5, 6)


class FakeTensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class FakeSender:
    """Records what was sent; ``gate`` holds the first send back, ``fails`` plays a request Triton gave up."""

    def __init__(self):
        self.sent = []
        self.final = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.cancelled = self.fails = False

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        self.gate.wait(5)
        if self.fails:
            self.final.set()
            raise PB_UTILS.TritonModelException("gone")
        assert not self.final.is_set(), "nothing follows the final response"
        self.sent.append((response, flags))
        if flags & FINAL:
            self.final.set()


class FakeMetricFamily:
    GAUGE, COUNTER = 1, 2

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels):  # noqa: N802  Triton's name
        return SimpleNamespace(set=lambda value: None, increment=lambda value: None)


def fake_response(output_tensors, error=None):
    return SimpleNamespace(
        arrays={tensor.name(): tensor.as_numpy() for tensor in output_tensors}, error=error and error.message
    )


PB_UTILS = SimpleNamespace(
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    TritonModelException=type("TritonModelException", (Exception,), {}),
    Tensor=FakeTensor,
    TritonError=lambda message: SimpleNamespace(message=message),
    InferenceResponse=fake_response,
    MetricFamily=FakeMetricFamily,
)


class FakeEngine:
    """Keeps requests; the test plays their outputs."""

    def __init__(self):
        self.requests = {}
        self.refusal = None

    def submit(self, request):
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.request_id] = request

    def cancel(self, request_id):
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.on_output(Output(request_id, (), finish_reason="cancelled"))
        return request is not None

    def close(self):
        for request_id in list(self.requests):
            self.cancel(request_id)

    def statistics(self):
        names = "num_requests_waiting num_requests_running num_blocks_total num_blocks_free num_blocks_used num_steps"
        zeros = dict.fromkeys([*names.split(), "num_generated_tokens", "num_requests_active"], 0)
        return SimpleNamespace(**zeros, speculation=NO_SPECULATION)

    def emit(self, index, token_ids, text, finish_reason=None, **more):
        request = list(self.requests.values())[index]
        if finish_reason is not None:
            del self.requests[request.request_id]
        request.on_output(Output(request.request_id, tuple(token_ids), text, finish_reason, **more))


def make_request(request_id="", sender=None, **inputs):
    given = {"input_ids": np.array([[5, 6, 7]], np.int32), "input_lengths": 3, "request_output_len": 9, **inputs}
    tensors = [
        FakeTensor(name, value if isinstance(value, np.ndarray) else np.array([value])) for name, value in given.items()
    ]
    sender = sender or FakeSender()
    return SimpleNamespace(
        inputs=lambda: tensors, request_id=lambda: request_id, get_response_sender=lambda: sender, sender=sender
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = load_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("tokenizer")))
    return ServedModel(tokenizer, NUM_TOKENS, frozenset([2]))


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(engine, model):
    service = GenerationService(
        engine, model, PB_UTILS, cancellation_period_ms=10, statistics_period_ms=10, control_id="secret"
    )
    yield service
    service.close()


def test_tokens_that_pile_up_leave_together(service, engine) -> None:
    request = make_request(streaming=True, return_num_output_tokens=True)
    service.execute([request])
    request.sender.gate.clear()
    engine.emit(0, [5], "a")
    time.sleep(0.05)  # the sender thread takes the first output and waits at the gate
    for token in (6, 7, 8):
        engine.emit(0, [token], "b")
    engine.emit(0, [9], "c", "max_tokens")
    request.sender.gate.set()
    assert request.sender.final.wait(5)
    texts = [response.arrays["output_text"].item() for response, _ in request.sender.sent]
    assert texts == [b"a", b"bbbc"]
    assert [response.arrays["num_output_tokens"].item() for response, _ in request.sender.sent] == [1, 5]
    assert [flags for _, flags in request.sender.sent] == [0, FINAL]


def test_what_belongs_to_the_stub_is_let_go_before_the_stub_ends(engine, model) -> None:
    """Without waiting for Python's collector, which runs when Triton's stub has gone, and crashes there."""
    families = weakref.WeakSet()

    class Family(FakeMetricFamily):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            families.add(self)

    pb_utils = SimpleNamespace(**{**vars(PB_UTILS), "MetricFamily": Family})
    service = GenerationService(
        engine, model, pb_utils, cancellation_period_ms=10, statistics_period_ms=10, control_id=None
    )
    request = make_request()
    sender = weakref.ref(request.sender)
    gc.disable()
    try:
        service.execute([request])
        engine.emit(0, [8], "x", "max_tokens")
        assert request.sender.final.wait(5)
        assert len(families) > 0
        service.close()
        del request
        assert sender() is None
        assert len(families) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("exclude", [True, False])
def test_a_whole_answer_is_one_response_with_the_prompt_unless_excluded(service, engine, model, exclude) -> None:
    request = make_request(exclude_input_in_output=exclude, return_perf_metrics=True)
    service.execute([request])
    engine.emit(0, [8], "x")
    engine.emit(0, [9], "y", "max_tokens", metrics=METRICS)
    assert request.sender.final.wait(5)
    ((response, flags),) = request.sender.sent
    prompt = "" if exclude else model.tokenizer.decode([5, 6, 7])
    assert flags == FINAL
    assert response.arrays["output_text"].item().decode() == prompt + "xy"
    assert response.arrays["output_ids"].tolist() == [[[8, 9] if exclude else [5, 6, 7, 8, 9]]]
    assert response.arrays["first_token_time_ns"].item() == 12
    assert "num_output_tokens" not in response.arrays


def test_rows_of_a_batch_are_tagged_and_the_last_one_is_final(service, engine) -> None:
    rows = np.array([3, 2])
    request = make_request(input_ids=np.array([[5, 6, 7]] * 2), input_lengths=rows, request_output_len=rows)
    service.execute([request])
    engine.emit(1, [8], "second", "end_id")
    engine.emit(0, [9], "first", "end_id")
    assert request.sender.final.wait(5)
    assert [(response.arrays["batch_index"].item(), flags) for response, flags in request.sender.sent] == [
        (1, 0),
        (0, FINAL),
    ]


def test_a_refused_request_gets_one_final_error(service, engine) -> None:
    engine.refusal = RequestError("max_tokens", "must fit", 9, "ask for less")
    refused, malformed = make_request(), make_request(temperature=-1.0)
    service.execute([refused, malformed])
    for request, message in ((refused, "max_tokens: must fit"), (malformed, "temperature: must be")):
        assert request.sender.final.wait(5)
        ((response, flags),) = request.sender.sent
        assert response.error.startswith(message)
        assert flags == FINAL


@pytest.mark.parametrize("how", ["stop", "client"])
def test_cancellation_ends_with_an_empty_final(service, engine, how) -> None:
    request, other = make_request("mine", streaming=True), make_request("another", streaming=True)
    service.execute([request, other])
    if how == "stop":
        stop = make_request("mine", stop=True)
        service.execute([stop])
        assert stop.sender.sent == [(None, FINAL)] or stop.sender.sent[0][1] == FINAL
    else:
        request.sender.cancelled = True
    assert request.sender.final.wait(5)
    assert request.sender.sent == [(None, FINAL)]
    assert len(engine.requests) == 1


def test_a_stop_without_a_request_id_stops_nothing(service, engine) -> None:
    service.execute([make_request(streaming=True), make_request("", stop=True)])
    assert len(engine.requests) == 1


def test_a_shutdown_ends_every_request_with_an_error(service, engine) -> None:
    requests = [make_request("a", streaming=True), make_request("b")]
    service.execute(requests)
    service.execute([make_request("secret", stop=True)])
    for request in requests:
        assert request.sender.final.wait(5)
        assert "shutdown" in request.sender.sent[-1][0].error


def test_a_sender_that_fails_cancels_its_request_and_no_other(service, engine) -> None:
    lost, kept = make_request(streaming=True), make_request(streaming=True)
    lost.sender.fails = True
    service.execute([lost, kept])
    engine.emit(0, [5], "a")
    assert lost.sender.final.wait(5)
    deadline = time.monotonic() + 5
    while len(engine.requests) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.emit(0, [5], "a", "max_tokens")
    assert kept.sender.final.wait(5)


NUMBERS = SpeculationNumbers(3, 12, 9, 4, 6, 10, 4, histogram=(1, 0, 2))


def play_accepted_runs(engine) -> None:
    """Two steps of several tokens; the second run is cut by the end of the answer, with text held back until then."""
    more = {"log_probs": (-0.5, -0.25, -1.0), "logits": np.arange(6, dtype=np.float32).reshape(3, 2)}
    engine.emit(0, [5, 6, 7], "abc", num_accepted_tokens=2, pieces=("a", "b", "c"), **more)
    more = {"log_probs": (-2.0, -0.125), "logits": np.full((2, 2), 9, np.float32)}
    metrics = replace(METRICS, num_output_tokens=5, speculation=NUMBERS)
    engine.emit(
        0, [8, 9], "dhe", "stop_words", num_accepted_tokens=2, pieces=("d", ""), metrics=metrics, **more
    )  # fmt: skip


WANTED = dict.fromkeys(
    [f"return_{name}" for name in ("acceptance", "log_probs", "generation_logits", "num_output_tokens")], True
)


@pytest.mark.parametrize("exclude", [True, False])
def test_accepted_runs_of_a_whole_answer(service, engine, exclude) -> None:
    request = make_request(exclude_input_in_output=exclude, return_perf_metrics=True, **WANTED)
    service.execute([request])
    play_accepted_runs(engine)
    assert request.sender.final.wait(5)
    ((response, _),) = request.sender.sent
    arrays = response.arrays
    assert arrays["output_ids"].ravel().tolist() == [*([] if exclude else [5, 6, 7]), 5, 6, 7, 8, 9]
    assert arrays["num_output_tokens"].item() == 5
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -0.25, -1.0, -2.0, -0.125]]]
    assert arrays["cum_log_probs"].tolist() == [[-3.875]]
    assert arrays["generation_logits"].shape == (1, 1, 5, 2)
    assert arrays["token_texts"].tolist() == [[b"a", b"b", b"c", b"d", b"", b"he"]]
    assert arrays["is_draft"].tolist() == [[True, True, False, True, True, False]]
    assert arrays["acceptance_rate"].item() == pytest.approx(4 / 12)
    assert (arrays["total_accepted_draft_tokens"].item(), arrays["total_draft_tokens"].item()) == (4, 12)
    assert arrays["acceptance_histogram"].tolist() == [[1, 0, 2]]
    counts = ("total_verified_draft_tokens", "total_emitted_tokens", "num_draft_forwards", "num_target_forwards")
    assert [arrays[name].item() for name in counts] == [9, 6, 10, 4]


def test_accepted_runs_of_a_stream(service, engine) -> None:
    request = make_request(streaming=True, **WANTED)
    service.execute([request])
    request.sender.gate.clear()
    play_accepted_runs(engine)
    request.sender.gate.set()
    assert request.sender.final.wait(5)
    arrays = [response.arrays for response, _ in request.sender.sent]
    joined = {name: [value for one in arrays for value in one[name].ravel().tolist()] for name in arrays[-1]}
    assert joined["output_ids"] == [5, 6, 7, 8, 9]
    assert len(joined["output_log_probs"]) == 5
    assert b"".join(joined["token_texts"]) == b"".join(joined["output_text"]) == b"abcdhe"
    assert sum(joined["is_draft"]) == 4
    assert sum(one["generation_logits"].shape[2] for one in arrays) == 5
    assert (joined["num_output_tokens"][-1], joined["cum_log_probs"][-1]) == (5, -3.875)
    assert joined["acceptance_histogram"] == [1, 0, 2]
    assert "kv_cache_reused_blocks" not in arrays[-1]


def test_the_engine_is_asked_as_the_client_asked(service, engine) -> None:
    service.execute([make_request(speculate=False, max_draft_tokens=3, return_log_probs=True)])
    service.execute([make_request(return_generation_logits=True)])
    first, second = engine.requests.values()
    assert (first.speculate, first.max_draft_tokens, first.return_log_probs, first.return_logits) == (
        False, 3, True, False,
    )  # fmt: skip
    assert (second.speculate, second.max_draft_tokens, second.return_log_probs, second.return_logits) == (
        True, None, False, True,
    )  # fmt: skip


def test_what_was_not_asked_for_does_not_come(service, engine) -> None:
    request = make_request()
    service.execute([request])
    play_accepted_runs(engine)
    assert request.sender.final.wait(5)
    ((response, _),) = request.sender.sent
    assert set(response.arrays) == {"output_ids", "sequence_length", "output_text"}

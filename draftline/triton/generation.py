"""What the ``tensorrt_llm`` model does: requests to the engine, its outputs to Triton's response senders.

Three threads: Triton calls ``execute``, which returns at once; the engine's thread reports outputs; one sender thread
sends. ``send`` is a synchronous round trip to the server (about 0.3 ms), so tokens of one stream that pile up while
others are being sent leave together.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from draftline.errors import DraftlineError
from draftline.runtime.request import Output, Request
from draftline.runtime.text_stream import TextStream
from draftline.triton.generation_request import GenerationRequest, ServedModel, read_generation_requests
from draftline.triton.generation_response import Sent, build_arrays
from draftline.triton.metrics import EngineStatistics, MetricsReporter
from draftline.triton.tensors import read_inputs, read_scalar

SHUTDOWN_MESSAGE = "server: must run to answer; got a shutdown; send the request again later"


class ServedEngine(Protocol):
    """The part of ``draftline.runtime.engine.Engine`` that serving needs."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def close(self) -> None: ...
    def statistics(self) -> EngineStatistics: ...


class _Call:
    """A request of Triton: one response sender for all its rows."""

    def __init__(self, client_request_id: str, sender: Any, num_rows: int) -> None:
        self.client_request_id = client_request_id
        self.sender = sender
        self.num_open_rows = num_rows
        self.streams: list[_Stream] = []


class _Stream:
    """A row of a call on its way through the engine; ``pending`` is shared by the engine's and the sender's thread."""

    def __init__(self, stream_id: str, call: _Call, row: GenerationRequest) -> None:
        self.stream_id = stream_id
        self.call = call
        self.row = row
        self.pending: list[Output] = []
        self.sent = Sent()


class GenerationService:
    """Serve an engine behind Triton's Python backend.

    ``pb_utils`` is the backend's module. ``control_id`` is a request id that only the server process knows: a stop
    request with this id ends every request, which is how a shutdown ends streams that would outlast it.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: ServedModel,
        pb_utils: Any,
        *,
        cancellation_period_ms: int,
        statistics_period_ms: int,
        control_id: str | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._pb_utils = pb_utils
        self._final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._cancellation_seconds = cancellation_period_ms / 1000
        self._statistics_seconds = statistics_period_ms / 1000
        self._next_statistics = time.monotonic()
        self._control_id = control_id
        self._stopping = False
        self._stream_ids = itertools.count()
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()  # guards _calls and every stream's pending outputs
        self._ready: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._metrics = MetricsReporter(pb_utils)
        # A daemon: a stub that lost its server exits without ``close``, and must not wait for this thread.
        self._sender_thread = threading.Thread(target=self._run_sender, name="draftline-sender", daemon=True)
        self._sender_thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Start the requests and return; responses follow from the sender thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except DraftlineError as error:
                sender.send(self._build_error(str(error)), flags=self._final)

    def close(self) -> None:
        """End every request, send what is left and join the threads."""
        self._stopping = True
        self._engine.close()
        self._ready.put(None)
        self._sender_thread.join()
        self._metrics.close()

    def _start(self, request: Any, sender: Any) -> None:
        arrays = read_inputs(request)
        if read_scalar(arrays, "stop", 0):
            self._stop(request.request_id())
            sender.send(flags=self._final)
            return
        rows = read_generation_requests(arrays, self._model)
        call = _Call(request.request_id(), sender, len(rows))
        call.streams = [_Stream(str(next(self._stream_ids)), call, row) for row in rows]
        with self._lock:
            self._calls.add(call)
        for stream in call.streams:
            try:
                self._engine.submit(self._build_request(stream))
            except DraftlineError as error:
                self._report(stream, Output(stream.stream_id, (), finish_reason="error", error=str(error)))

    def _stop(self, client_request_id: str) -> None:
        everything = self._control_id is not None and client_request_id == self._control_id
        self._stopping = self._stopping or everything
        with self._lock:
            calls = [call for call in self._calls if everything or call.client_request_id == client_request_id]
        if client_request_id:
            self._cancel(calls)

    def _cancel(self, calls: Iterable[_Call]) -> None:
        for call in calls:
            for stream in call.streams:
                self._engine.cancel(stream.stream_id)

    def _build_request(self, stream: _Stream) -> Request:
        row, tokenizer = stream.row, self._model.tokenizer
        return Request(
            request_id=stream.stream_id,
            prompt_ids=row.prompt_ids,
            max_tokens=row.max_tokens,
            on_output=lambda output: self._report(stream, output),
            sampling=row.sampling,
            end_ids=row.end_ids,
            text_stream=TextStream(lambda ids: tokenizer.decode(ids, skip_special_tokens=True), row.stop_words),
            speculate=row.speculate,
            max_draft_tokens=row.max_draft_tokens,
            return_log_probs=row.reports.log_probs,
            return_logits=row.reports.generation_logits,
        )

    def _report(self, stream: _Stream, output: Output) -> None:
        with self._lock:
            is_queued = stream.row.streaming and bool(stream.pending)
            stream.pending.append(output)
        if not is_queued and (stream.row.streaming or output.finish_reason is not None):
            self._ready.put(stream)

    def _run_sender(self) -> None:
        try:
            self._send_until_closed()
        except BaseException:
            # Without a sender every client would wait for ever. ``serve`` sees a dead model and says so.
            traceback.print_exc()
            os._exit(1)

    def _send_until_closed(self) -> None:
        next_check = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_check:
                self._check_clients()
                next_check = now + self._cancellation_seconds
            try:
                stream = self._ready.get(timeout=max(0.0, next_check - time.monotonic()))
            except queue.Empty:
                continue
            if stream is None:
                break
            self._send_pending(stream)
        self._metrics.report_active(0)
        self._metrics.report_statistics(self._engine.statistics())

    def _check_clients(self) -> None:
        with self._lock:
            calls = list(self._calls)
        self._cancel(call for call in calls if call.sender.is_cancelled())
        self._metrics.report_active(len(calls))
        if time.monotonic() >= self._next_statistics:
            self._metrics.report_statistics(self._engine.statistics())
            self._next_statistics = time.monotonic() + self._statistics_seconds

    def _send_pending(self, stream: _Stream) -> None:
        with self._lock:
            outputs, stream.pending = stream.pending, []
        last = outputs[-1]
        call = stream.call
        flags = 0
        if last.finish_reason is not None:
            call.num_open_rows -= 1
            flags = self._final if call.num_open_rows == 0 else 0
        response = self._build_response(stream, outputs)
        if response is not None or flags:
            try:
                call.sender.send(response, flags=flags)
            except self._pb_utils.TritonModelException:
                # Triton has given the request up: no one is left to tell, and the engine need not go on.
                self._cancel([call])
        if flags:
            with self._lock:
                self._calls.discard(call)
            call.streams = []  # out of the circle: a sender that outlives Triton's stub takes the process down with it

    def _build_response(self, stream: _Stream, outputs: Sequence[Output]) -> Any:
        """Return an ``InferenceResponse``, or None for the plain end that a client gets who cancelled."""
        last = outputs[-1]
        if last.finish_reason == "error":
            return self._build_error(last.error or "the engine failed")
        if last.finish_reason == "cancelled":
            # A client that did not cancel must not take a cut answer for a whole one.
            return self._build_error(SHUTDOWN_MESSAGE) if self._stopping else None
        stream.sent = stream.sent.after(outputs)
        arrays = build_arrays(stream.row, outputs, stream.sent, self._model.tokenizer)
        tensors = [self._pb_utils.Tensor(name, array) for name, array in arrays.items()]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _build_error(self, message: str) -> Any:
        return self._pb_utils.InferenceResponse(output_tensors=[], error=self._pb_utils.TritonError(message))

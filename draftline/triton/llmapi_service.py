"""Serves the classic names: each request is asked again of the ``llmapi`` model, and its responses are passed on."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from draftline.errors import RequestError
from draftline.triton.llmapi_client import LlmapiClient, LlmapiError
from draftline.triton.llmapi_contract import INPUT_NAMES, STOP
from draftline.triton.llmapi_front import Answer, tell_request
from draftline.triton.tensors import Arrays, read_inputs

UNEXPECTED = "server: a request ends with an answer or the reason; got neither; read the server's log"


class FrontService:
    """Relays requests, each in a thread of its own, as reading the answers of the other model blocks.

    ``triton`` is ``triton_python_backend_utils``; ``max_requests`` are relayed at once, further ones wait. A request
    with ``stop`` ends those of the same id. The model is told within ``cancellation_check_period_ms`` that nobody waits
    for a request any more: it was stopped, or its client is gone.
    """

    def __init__(
        self, triton: Any, llmapi: LlmapiClient, *, max_requests: int, cancellation_check_period_ms: int
    ) -> None:
        self._triton = triton
        self._llmapi = llmapi
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="relay")
        self._period_seconds = cancellation_check_period_ms / 1000
        self._lock = Lock()
        self._running: dict[str, _Reply] = {}  # by the id that the model knows a request by
        self._is_closing = Event()
        self._watcher = Thread(target=self._watch, name="cancellation")
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            reply = _Reply(request, self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            inputs = read_inputs(request)
            if np.any(inputs.get(STOP, False)):
                self._stop(reply.request_id)
                reply.end()
            else:
                their_id = uuid.uuid4().hex
                with self._lock:
                    self._running[their_id] = reply
                self._threads.submit(self._serve, their_id, inputs, reply)

    def close(self) -> None:
        """Wait for the requests that run."""
        self._threads.shutdown()
        self._is_closing.set()
        self._watcher.join()

    def _stop(self, request_id: str) -> None:
        with self._lock:
            replies = [reply for reply in self._running.values() if request_id and reply.request_id == request_id]
        for reply in replies:
            reply.end()

    def _watch(self) -> None:
        while not self._is_closing.wait(self._period_seconds):
            with self._lock:
                asked = [(their_id, reply) for their_id, reply in self._running.items() if reply.is_asked]
            for their_id, reply in asked:
                if reply.is_over():
                    self._llmapi.stop(their_id)

    def _serve(self, their_id: str, inputs: Arrays, reply: _Reply) -> None:
        last = self._error(UNEXPECTED)  # sent in any case: a client must not wait for ever
        try:
            last = None if reply.is_over() else self._relay(their_id, inputs, reply)  # over while it waited
        except (RequestError, LlmapiError, self._triton.TritonModelException) as error:
            last = self._error(str(error))
        finally:
            with self._lock:
                del self._running[their_id]
            reply.end(last)

    def _relay(self, their_id: str, inputs: Arrays, reply: _Reply) -> Any:
        """Pass on what is streamed, and return what is left to send with the final flag: None where nothing is."""
        told = tell_request(inputs)
        is_streamed = INPUT_NAMES["stream"] in told and bool(told[INPUT_NAMES["stream"]][0])
        answer = Answer(is_streamed=is_streamed)
        reply.is_asked = True
        last = None
        for arrays in self._llmapi.stream(their_id, told):
            last = self._response(answer.tell_response(arrays))
            if is_streamed:
                reply.send(last)
                last = None
        return last

    def _response(self, arrays: Arrays) -> Any:
        tensors = [self._triton.Tensor(name, array) for name, array in arrays.items()]
        return self._triton.InferenceResponse(output_tensors=tensors)

    def _error(self, message: str) -> Any:
        return self._triton.InferenceResponse(output_tensors=[], error=self._triton.TritonError(message))


class _Reply:
    """The responses to one request: none after the last, whichever thread sends that."""

    def __init__(self, request: Any, final: int) -> None:
        self.request_id: str = request.request_id()
        self.is_asked = False  # of the model
        self._sender = request.get_response_sender()
        self._final = final
        self._lock = Lock()
        self._has_ended = False

    def is_over(self) -> bool:
        """Whether nobody waits for more: it has ended, or its client is gone."""
        with self._lock:
            return self._has_ended or bool(self._sender.is_cancelled())

    def send(self, response: Any) -> None:
        with self._lock:
            if not self._has_ended:
                self._sender.send(response)

    def end(self, response: Any = None) -> None:
        """Send the last one, or where that is None the plain end."""
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                flags = self._final
                self._sender.send(flags=flags) if response is None else self._sender.send(response, flags)

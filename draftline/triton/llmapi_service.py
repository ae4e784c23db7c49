"""Serves the classic names: each request is asked again of the ``llmapi`` model, and its responses are passed on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftline.errors import RequestError
from draftline.triton.llmapi_contract import INPUT_NAMES, LLMAPI, OUTPUT_NAMES
from draftline.triton.llmapi_front import Answer, tell_request
from draftline.triton.tensors import read_inputs

UNEXPECTED = "the request ended unexpectedly; read the server's log"


class FrontService:
    """Relays requests, each in a thread of its own: Triton's iterator over the answers of another model blocks.

    ``triton`` is ``triton_python_backend_utils``; ``max_requests`` are relayed at once, further ones wait.
    """

    def __init__(self, triton: Any, *, max_requests: int) -> None:
        self._triton = triton
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="relay")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._threads.submit(self._serve, request)

    def close(self) -> None:
        """Wait for the requests that run."""
        self._threads.shutdown()

    def _serve(self, request: Any) -> None:
        sender = request.get_response_sender()
        last = self._error(UNEXPECTED)  # sent in any case: a client must not wait for ever
        try:
            last = self._relay(request, sender)
        except RequestError as error:
            last = self._error(str(error))
        except self._triton.TritonModelException as error:
            last = self._error(str(error))
        finally:
            flags = self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(last, flags) if last is not None else sender.send(flags=flags)

    def _relay(self, request: Any, sender: Any) -> Any:
        """Pass on what is streamed, and return what is left to send with the final flag: None where nothing is."""
        inputs = tell_request(read_inputs(request))
        is_streamed = INPUT_NAMES["stream"] in inputs and bool(inputs[INPUT_NAMES["stream"]][0])
        answer = Answer(is_streamed=is_streamed)
        last = None
        for response in self._ask(request.request_id(), inputs):
            if response.has_error():
                return self._error(response.error().message())  # Triton's iterator must not be read past an error
            arrays = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
            # A request whose client is gone is read to its end: told to stop, the model ends it with an error, and
            # Triton's iterator over a stream that an error ends behind other responses never ends itself.
            if not arrays or sender.is_cancelled():
                continue
            last = self._response(answer.tell_response(arrays))
            if is_streamed:
                sender.send(last)
                last = None
        return last

    def _ask(self, request_id: str, inputs: dict[str, Any]) -> Any:
        tensors = [self._triton.Tensor(name, array) for name, array in inputs.items()]
        asked = self._triton.InferenceRequest(
            model_name=LLMAPI.name,
            request_id=request_id,
            requested_output_names=list(OUTPUT_NAMES),
            inputs=tensors,
        )
        return asked.exec(decoupled=True)

    def _response(self, arrays: dict[str, Any]) -> Any:
        tensors = [self._triton.Tensor(name, array) for name, array in arrays.items()]
        return self._triton.InferenceResponse(output_tensors=tensors)

    def _error(self, message: str) -> Any:
        return self._triton.InferenceResponse(output_tensors=[], error=self._triton.TritonError(message))

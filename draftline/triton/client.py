"""A client of the ensemble over gRPC."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from draftline.errors import DraftlineError, RequestError, ServerError
from draftline.triton.answer_options import AnswerOptions, Inputs
from draftline.triton.chat import ChatTemplate
from draftline.triton.chunk import Chunk, read_chunk

_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
}
_COUNT = "return_num_output_tokens"
_ERROR = re.compile(
    r"(?:in ensemble '[^']*', )?(?P<where>.+?): (?P<rule>.+?); got (?P<got>.+); (?P<cure>.+)", re.DOTALL
)


class Client:
    """Talk to the ensemble of a draftline server, or of any server with the classic contract.

    One instance serves any number of threads. A context manager; ``close`` ends the connection.
    """

    def __init__(self, url: str = "127.0.0.1:8001") -> None:
        self._url = url
        self._channel = grpc.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)])
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._configs: dict[str, Any] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; streams that are still open end with it."""
        self._channel.close()

    def ready(self, timeout_seconds: float = 5.0) -> bool:
        """Return whether the server is there and its ensemble is loaded."""
        request = service_pb2.ModelReadyRequest(name="ensemble")
        try:
            return bool(self._stub.ModelReady(request, timeout=timeout_seconds).ready)
        except grpc.RpcError:
            return False

    def generate(self, prompt: str, **options: Any) -> str:
        """Return the whole answer, without the prompt; an answer that was cancelled is as long as it got.

        ``options`` are the fields of ``AnswerOptions``, of which ``max_tokens`` is required, ``request_id``, and
        ``timeout_seconds`` until the request is given up.

        Raises: RequestError where the server refuses the request; ServerError where it does not answer.
        """
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str, **options: Any) -> Generator[str, None, None]:
        """Yield the answer as it grows; ``options`` are those of ``generate``. Closing the iterator cancels."""
        chunks = self.stream_chunks(prompt, **options)
        try:
            for chunk in chunks:
                if chunk.text:
                    yield chunk.text
        finally:
            chunks.close()

    def stream_chunks(
        self, prompt: str, *, request_id: str | None = None, timeout_seconds: float | None = None, **options: Any
    ) -> Generator[Chunk, None, None]:
        """Yield every response of the server: ``stream`` with token counts. Closing the iterator cancels."""
        request_id = request_id or uuid.uuid4().hex
        inputs = AnswerOptions(**options).build_inputs(prompt)
        request = _build_request("ensemble", request_id, inputs)
        if not self._counts_tokens():
            request = _build_request("ensemble", request_id, {**inputs, _COUNT: ("BOOL", None)})
        responses = self._stream(request, timeout_seconds)
        try:
            for response in responses:
                yield read_chunk(response)
        finally:
            responses.close()

    def cancel(self, request_id: str) -> None:
        """End a running request; its stream ends. Nothing happens where no request has this id.

        A server does not tell the engine inside an ensemble that a client is gone, so the engine itself is told, or
        what stands before TensorRT-LLM's llmapi model.
        """
        row = ("INT32", [1])
        stop: Inputs = {"stop": ("BOOL", [True])}
        if self._is_relayed():
            model = "ensemble"
            inputs: Inputs = {"text_input": ("BYTES", [b""]), "max_tokens": row, **stop}
        else:
            model = "tensorrt_llm"
            inputs = {"input_ids": row, "input_lengths": row, "request_output_len": row, **stop}
        for _ in self._stream(_build_request(model, request_id, inputs), timeout_seconds=10.0, is_stop=True):
            pass

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for chat messages, by the chat template the server publishes.

        Raises: RequestError where the model has no chat template or the template refuses the messages.
        """
        config = self._config("ensemble" if self._is_relayed() else "preprocessing")
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        return ChatTemplate.from_parameters(parameters).render(messages)

    def _counts_tokens(self) -> bool:
        return any(output.name == "num_output_tokens" for output in self._config("ensemble").output)

    def _is_relayed(self) -> bool:
        """Whether the classic names stand before TensorRT-LLM's llmapi model, and are no ensemble of Triton's."""
        return bool(self._config("ensemble").backend == "python")

    def _config(self, model: str) -> Any:
        if model not in self._configs:
            request = service_pb2.ModelConfigRequest(name=model)
            try:
                self._configs[model] = self._stub.ModelConfig(request, timeout=10.0).config
            except grpc.RpcError as error:
                raise self._unreachable(error) from error
        return self._configs[model]

    def _stream(
        self, request: Any, timeout_seconds: float | None, *, is_stop: bool = False
    ) -> Generator[Any, None, None]:
        """Yield the responses of one request; closing the iterator ends the request.

        The call is read to its end, past the final response: cancelling one that is just ending makes Triton 2.51 keep
        the ensemble's request for ever, and then it does not stop cleanly.
        """
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout_seconds)
        is_final = is_ended = has_started = False
        message = ""
        try:
            for response in call:
                result = response.infer_response
                is_final = result.parameters["triton_final_response"].bool_param
                message = message or response.error_message
                has_started = True
                if result.raw_output_contents and not message:
                    yield result
            is_ended = True
        except grpc.RpcError as error:
            is_ended = error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
            raise self._unreachable(error) from error
        finally:
            if not is_ended and is_stop:
                call.cancel()
            elif not is_ended:
                self._abandon(call, request.id, has_started=has_started)
        if message:
            raise _read_error(message)
        if not is_final:
            raise ServerError(self._url, "must finish its answer", "an end without a final response", "ask again")

    def _abandon(self, call: Any, request_id: str, *, has_started: bool) -> None:
        """End a request whose answer nobody reads any more."""
        if has_started:
            self.cancel(request_id)  # the engine has it, so this is its end, and the call ends by itself
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
            return
        call.cancel()
        self.cancel(request_id)

    def _unreachable(self, error: grpc.RpcError) -> ServerError:
        return ServerError(
            self._url, "must answer", f"{error.code().name}: {error.details()}", "start it with draftline serve"
        )


def _build_request(model: str, request_id: str, inputs: Inputs) -> Any:
    request: Any = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, (datatype, values) in inputs.items():
        if values is None:
            continue
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        contents = getattr(tensor.contents, _CONTENTS[datatype])
        try:
            contents.extend(values)
        except ValueError:
            got = ", ".join(map(str, values))
            raise RequestError(name, f"is a number that {datatype} holds", got, "send one in its range") from None
    return request


def _read_error(message: str) -> DraftlineError:
    """Turn the server's message back into the error the model raised."""
    match = _ERROR.fullmatch(message)
    if match is None:
        return ServerError("server", "must answer the request", message, "read the server's log")
    kind = ServerError if match["where"] == "server" else RequestError
    return kind(match["where"], match["rule"], match["got"], match["cure"])

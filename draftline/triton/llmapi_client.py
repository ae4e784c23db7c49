"""Asks TensorRT-LLM's ``llmapi`` model, over the HTTP port of the server it is in, and returns what it streams.

Over HTTP and not through Triton's business logic scripting: there the responses of a decoupled model are made into
Python objects on a thread that does not hold Python's lock (python_backend's ``ProcessBLSResponseDecoupled``), which
has corrupted the memory of a model that serves several streams.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.triton.llmapi_contract import LLMAPI
from draftline.triton.tensors import Arrays

_OUTPUTS = frozenset(tensor.name for tensor in LLMAPI.outputs)
_EVENT = b"data:"
STOP_SECONDS = 2.0  # a stop that is not answered must not keep others from being told


class LlmapiError(Exception):
    """What the model, or its server, said instead of an answer."""


class LlmapiClient:
    """Talks to the model at ``host:port``; one instance serves any number of threads."""

    def __init__(self, address: str) -> None:
        self._address = address

    def stream(
        self, request_id: str, inputs: Arrays, *, silence_seconds: float | None = None
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the outputs of every response, ``[n]`` by name: text as objects, numbers as JSON has them.

        Raises: LlmapiError where the model refuses the request or ends it with an error, or nobody answers, or nothing
            comes for ``silence_seconds``.
        """
        body = {name: [_plain(value) for value in array.ravel().tolist()] for name, array in inputs.items()}
        connection = http.client.HTTPConnection(self._address, timeout=silence_seconds)
        try:
            path = f"/v2/models/{LLMAPI.name}/generate_stream"
            connection.request("POST", path, json.dumps({"id": request_id, **body}))
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise LlmapiError(_read_error(response.read()))
            for line in _read_lines(response):
                if line.startswith(_EVENT):
                    outputs = _read_event(line.removeprefix(_EVENT))
                    if outputs:
                        yield outputs
        except (OSError, http.client.HTTPException, ValueError) as error:
            rule = f"server: {LLMAPI.name} must answer at {self._address}"
            cure = "read the server's log, and let llmapi_address in ensemble/config.pbtxt be its HTTP port"
            raise LlmapiError(f"{rule}; got {error!r}; {cure}") from error
        finally:
            connection.close()

    def stop(self, request_id: str) -> None:
        """End a request, whose stream ends with an error then; nothing happens where none has this id."""
        inputs = {"text_input": np.array([b""], np.object_), "stop": np.array([True])}
        try:
            for _ in self.stream(request_id, inputs, silence_seconds=STOP_SECONDS):
                pass
        except LlmapiError:
            pass  # its answer to a stop is an error


def _read_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield lines as they come; unlike iterating over ``response``, raises where it breaks off."""
    rest = b""
    while received := response.read1():
        *lines, rest = (rest + received).split(b"\n")
        yield from lines


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _read_event(text: bytes) -> dict[str, NDArray[Any]]:
    event = json.loads(text)
    if "error" in event:
        raise LlmapiError(event["error"])
    return {name: np.array(_listed(value), np.object_) for name, value in event.items() if name in _OUTPUTS}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read_error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")

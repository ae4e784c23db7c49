"""What becomes of a request that Triton has given up; all else is tested in the real server."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from draftline.triton.llmapi_service import FrontService


class GivenUpError(Exception):
    pass


class Sender:
    def __init__(self) -> None:
        self.was_asked = threading.Event()

    def is_cancelled(self) -> bool:
        return False

    def send(self, *response: Any, **flags: Any) -> None:
        self.was_asked.set()
        raise GivenUpError


class Llmapi:
    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stream(self, request_id: str, inputs: Any) -> Any:
        yield {"text_output": np.array(["a"], np.object_)}

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)


def test_a_request_that_triton_has_given_up_is_forgotten() -> None:
    triton = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonModelException=GivenUpError,
        TritonError=lambda message: message,
        Tensor=lambda name, array: SimpleNamespace(name=lambda: name, as_numpy=lambda: array),
        InferenceResponse=lambda output_tensors, error=None: (output_tensors, error),
    )
    llmapi: Any = Llmapi()
    sender = Sender()
    inputs = {
        "text_input": np.array([[b"a"]], np.object_),
        "max_tokens": np.array([[1]], np.int32),
        "stream": np.array([[True]]),
    }
    request = SimpleNamespace(
        inputs=lambda: [triton.Tensor(name, array) for name, array in inputs.items()],
        request_id=lambda: "an id",
        get_response_sender=lambda: sender,
    )
    service = FrontService(triton, llmapi, max_requests=1, cancellation_check_period_ms=1)
    try:
        service.execute([request])
        assert sender.was_asked.wait(5)
        time.sleep(0.1)  # 100 looks at what runs
        told = len(llmapi.stopped)
        time.sleep(0.1)
        assert len(llmapi.stopped) == told
    finally:
        service.close()

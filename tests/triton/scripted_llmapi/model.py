"""TensorRT-LLM's llmapi model as far as the wire goes: it says the words of its prompt, as they are asked for.

Streamed responses carry the text so far, numbers come as text, and ``stop`` ends the request of the same id: as there.
The prompt ``running`` is answered with the number of other requests that run.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.stopped = set()
        self.num_running = 0
        self.lock = threading.Lock()

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.count, args=(request,)).start()

    def count(self, request):
        with self.lock:
            self.num_running += 1
        try:
            self.answer(request)
        finally:
            with self.lock:
                self.num_running -= 1

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        assert all(value.ndim == 1 for value in given.values()), "no batch dimension"
        sender, request_id = request.get_response_sender(), request.request_id()
        if given.get("stop", [False])[0]:
            self.stopped.add(request_id)
            sender.send(self.error("Request cancelled by client"), flags=FINAL)
            return
        words = given["text_input"][0].decode().split(" ")[: int(given["sampling_param_max_tokens"][0])]
        if words == ["running"]:
            words = [str(self.num_running - 1)]
        if words == ["fail"]:
            sender.send(self.error("Error generating request: asked for"), flags=FINAL)
            return
        is_streamed = bool(given.get("streaming", [False])[0])
        for number in range(1, len(words) + 1):
            time.sleep(0.005)
            if request_id in self.stopped:
                sender.send(self.error("Request cancelled by client"), flags=FINAL)
                return
            if is_streamed or number == len(words):
                sender.send(self.response(" ".join(words[:number]), given), FINAL if number == len(words) else 0)

    def response(self, text, given):
        tensors = [pb_utils.Tensor("text_output", np.array([text.encode()], np.object_))]
        if given.get("sampling_param_return_perf_metrics", [False])[0]:
            tensors.append(pb_utils.Tensor("acceptance_rate", np.array([0.25], np.float32)))
        return pb_utils.InferenceResponse(tensors)

    def error(self, message):
        return pb_utils.InferenceResponse([], error=pb_utils.TritonError(message))

"""Requests as the clients of TensorRT-LLM send them."""

from __future__ import annotations

import queue

import numpy as np
import tritonclient.grpc
from tritonclient.utils import np_to_triton_dtype

from draftline.triton.contract import ENSEMBLE_INPUTS, GENERATION_INPUTS

DTYPES = {"STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64}


def ask_classically(server, inputs: dict, outputs=("text_output",), model="ensemble", request_id="") -> list:
    """Ask as the clients of TensorRT-LLM do: every scalar [1, 1], a bidirectional stream, chosen outputs."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    tensors = []
    for name, array in inputs.items():
        tensor = tritonclient.grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}") as classic:
        classic.start_stream(lambda result, error: answers.put((result, error)))
        requested = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs] if outputs else None
        classic.async_stream_infer(
            model, tensors, outputs=requested, request_id=request_id, enable_empty_final_response=True
        )
        collected = []
        while True:
            result, error = answers.get(timeout=20)
            if error is not None:
                raise error
            if result.get_response().outputs:
                collected.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return collected


def scalars(**values: object) -> dict[str, np.ndarray]:
    types = {tensor.name: DTYPES.get(tensor.datatype) for tensor in (*ENSEMBLE_INPUTS, *GENERATION_INPUTS)}
    return {
        name: np.array([[value.encode() if isinstance(value, str) else value]], types[name])
        for name, value in values.items()
    }

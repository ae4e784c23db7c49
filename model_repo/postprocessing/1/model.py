"""Triton's entry to postprocessing; the work is done by ``draftline.triton.postprocessing``."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.triton.model_arguments import ModelArguments
from draftline.triton.postprocessing import Postprocessor
from draftline.triton.tensors import read_inputs


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        arguments = ModelArguments(args)
        tokenizer = load_tokenizer(arguments.path("tokenizer_dir"))
        self.postprocessor = Postprocessor(tokenizer, skip_special_tokens=arguments.flag("skip_special_tokens"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        responses = []
        for request in requests:
            arrays = self.postprocessor.postprocess(read_inputs(request))
            tensors = [pb_utils.Tensor(name, array) for name, array in arrays.items()]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses

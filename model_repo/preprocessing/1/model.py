"""Triton's entry to preprocessing; the work is done by ``draftline.triton.preprocessing``."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import DraftlineError
from draftline.triton.model_arguments import ModelArguments
from draftline.triton.preprocessing import Preprocessor
from draftline.triton.tensors import read_inputs


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        arguments = ModelArguments(args)
        tokenizer = load_tokenizer(arguments.path("tokenizer_dir"))
        self.preprocessor = Preprocessor(tokenizer, add_special_tokens=arguments.flag("add_special_tokens"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            arrays = self.preprocessor.preprocess(read_inputs(request))
        except DraftlineError as error:
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])

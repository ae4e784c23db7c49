"""Triton's entry to the classic names before TensorRT-LLM; the work is done by ``draftline.triton.llmapi_service``."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from draftline.triton.llmapi_client import LlmapiClient
from draftline.triton.llmapi_service import FrontService
from draftline.triton.model_arguments import ModelArguments


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        arguments = ModelArguments(args)
        self.service = FrontService(
            pb_utils,
            LlmapiClient(arguments.text("llmapi_address")),
            max_requests=arguments.integer("max_requests"),
            cancellation_check_period_ms=arguments.integer("cancellation_check_period_ms"),
        )

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        self.service.execute(requests)

    def finalize(self) -> None:
        self.service.close()

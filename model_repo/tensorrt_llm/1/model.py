"""Triton's entry to the engine; the work is done by ``draftline.triton.generation``."""

from __future__ import annotations

import triton_python_backend_utils as pb_utils

from draftline.generation import load_engine
from draftline.triton.generation import GenerationService
from draftline.triton.generation_request import ServedModel
from draftline.triton.model_arguments import ModelArguments


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        arguments = ModelArguments(args)
        self.loaded = load_engine(arguments.path("gpt_model_path"))
        model = ServedModel(
            tokenizer=self.loaded.tokenizer,
            vocab_size=self.loaded.config.model.vocab_size,
            eos_token_ids=frozenset(self.loaded.config.model.eos_token_ids),
            exclude_input_in_output=arguments.flag("exclude_input_in_output"),
        )
        self.service = GenerationService(
            self.loaded.engine,
            model,
            pb_utils,
            cancellation_period_ms=arguments.integer("cancellation_check_period_ms"),
            statistics_period_ms=arguments.integer("stats_check_period_ms"),
            control_id=arguments.control_id,
        )

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        self.service.execute(requests)

    def finalize(self) -> None:
        self.service.close()
        self.loaded.close()

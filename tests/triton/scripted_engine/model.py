"""The ``tensorrt_llm`` model over the real engine and a session that recites a text: what it says depends on nothing
but the position, so every answer is known beforehand. It drafts from the answer itself: once the text comes round
again, a step says several tokens, unless a request does not want to speculate."""

from __future__ import annotations

import time

import numpy as np
import triton_python_backend_utils as pb_utils

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.runtime.drafters.building import DrafterSetup, Speculation
from draftline.runtime.engine import Engine
from draftline.sessions.protocol import StepResult
from draftline.speculation import TreeShape
from draftline.triton.generation import GenerationService
from draftline.triton.generation_request import ServedModel
from draftline.triton.model_arguments import ModelArguments


class RecitingSession:
    """After the token at position p comes token p + 1 of the script, over and over."""

    key_chunk = 0

    def __init__(self, script, vocab_size, step_seconds):
        self.script = np.array(script, np.int32)
        self.vocab_size = vocab_size
        self.step_seconds = step_seconds

    def forward(self, batch):
        time.sleep(self.step_seconds)
        sampled_ids = self.script[(batch.position_ids[batch.sample_rows] + 1) % len(self.script)]
        logits = 10 * np.eye(self.vocab_size, dtype=np.float32)[sampled_ids] if batch.wants_logits else None
        return StepResult(sampled_ids, logits)

    def commit(self, rows, slots):
        pass

    def close(self):
        pass


class TritonPythonModel:
    def initialize(self, args):
        arguments = ModelArguments(args)
        directory = arguments.path("gpt_model_path")
        tokenizer = load_tokenizer(directory)
        script = tokenizer.encode((directory / "script.txt").read_text("utf-8"), add_special_tokens=False)
        engine = Engine(
            RecitingSession(script, tokenizer.vocab_size, step_seconds=0.004), max_batch_size=8, max_seq_len=2048,
            max_num_tokens=64, block_size=16, max_blocks=512, prefix_cache=True,
            speculation=Speculation((DrafterSetup("ngram"),), TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)),
        )  # fmt: skip
        model = ServedModel(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=frozenset([2]))
        self.service = GenerationService(
            engine, model, pb_utils, cancellation_period_ms=50, statistics_period_ms=50, control_id=arguments.control_id
        )

    def execute(self, requests):
        self.service.execute(requests)

    def finalize(self):
        self.service.close()

"""The target in openvino-genai: continuous batching over a paged cache, from the weights of a converted checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftline.bench.openvino_model import PIP_LINE
from draftline.bench.timeline import Timeline
from draftline.checkpoints.optional_package import import_optional

# Without hints OpenVINO computes in bfloat16 where the processor has it, and keeps keys and values in 8 bits.
FLOAT32 = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}
_DESCRIBED = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


def describe_defaults() -> str:
    """Say in what precision OpenVINO computes here, unless it is told."""
    core = import_optional("openvino", "the OpenVINO reference", PIP_LINE).Core()
    values = {name: core.get_property("CPU", name) for name in _DESCRIBED}
    return ", ".join(f"{name} {_type_name(value)}" for name, value in values.items())


class OpenVinoReference:
    """``ContinuousBatchingPipeline`` on the CPU; greedy, and deaf to end tokens, so that lengths are fixed."""

    def __init__(self, model: Path, *, float32: bool, num_threads: int, max_batch_size: int, cache_gib: int) -> None:
        """Load the folder that ``write_openvino_model`` wrote; without ``float32`` precisions are OpenVINO's defaults.

        Raises: MissingPackageError without openvino-genai.
        """
        self._openvino: Any = import_optional("openvino", "the OpenVINO reference", PIP_LINE)
        self._genai: Any = import_optional("openvino_genai", "the OpenVINO reference", PIP_LINE)
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = max_batch_size
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = cache_gib
        properties = {"INFERENCE_NUM_THREADS": num_threads, **(FLOAT32 if float32 else {})}
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._num_requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[Timeline], list[list[int]]]:
        """Continue every prompt by ``num_tokens`` tokens; returns when they came, and what they are."""
        settings = self._genai.GenerationConfig()
        settings.max_new_tokens, settings.do_sample, settings.ignore_eos = num_tokens, False, True
        settings.set_eos_token_id(0)  # the folder names none, and none is refused
        started = time.perf_counter()
        handles = []
        for prompt in prompts:
            self._num_requests += 1
            ids = self._openvino.Tensor(np.array([list(prompt)], np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, ids, settings))
        timelines = [Timeline(started) for _ in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            instant = time.perf_counter()
            for handle, timeline, answer in zip(handles, timelines, answers, strict=True):
                if handle.can_read():
                    (output,) = handle.read().values()
                    answer += output.generated_ids
                    timeline.events.append((instant, len(answer)))
        return timelines, answers


def _type_name(value: Any) -> str:
    return str(value.get_type_name()) if hasattr(value, "get_type_name") else str(value)

"""The model repository of TensorRT-LLM up to 1.2.1: the classic ensemble around Triton's ``tensorrtllm`` backend.

Source: ``triton_backend/all_models/inflight_batcher_llm`` of TensorRT-LLM and the model configuration page of Triton's
``tensorrtllm_backend``. The names of parameters live here and nowhere else. Pre- and postprocessing are draftline's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.sessions.tensorrt_llm import EngineLimits
from draftline.triton.chat import publish_chat_template
from draftline.triton.contract import MODELS, SPECULATION_OUTPUTS, Model, Step, Tensor
from draftline.triton.repository import write_model
from draftline.triton.serve_script import write_tensorrtllm_script

TOKENIZER_PATH = "../checkpoint"  # from the repository

# What draftline adds to the classic contract (``contract.py``), which TensorRT-LLM's backend does not know.
ADDITIONS = frozenset(
    {
        *("min_length", "random_seed"),  # the spellings of earlier releases
        *("speculate", "max_draft_tokens", "return_acceptance", "token_texts", "is_draft", "acceptance_histogram"),
        *("output_text", "TEXT"),
        *SPECULATION_OUTPUTS,
    }
)
DECODING_MODES = {None: "top_k_top_p", "medusa": "medusa", "eagle1": "eagle"}
CHOICES = {"medusa": "medusa_choices", "eagle1": "eagle_choices"}

# The backend's own defaults, written out: what is not written it takes for a template variable that nobody filled.
DEFAULTS = {
    "max_beam_width": "1",
    "gpt_model_type": "inflight_fused_batching",
    "batch_scheduler_policy": "guaranteed_no_evict",
    "kv_cache_host_memory_bytes": "0",
    "kv_cache_onboard_blocks": "true",
    "exclude_input_in_output": "false",
    "normalize_log_probs": "true",
    "cancellation_check_period_ms": "100",
    "stats_check_period_ms": "100",
    "recv_poll_period_ms": "0",
    "num_nodes": "1",
    "gpu_weights_percent": "1.0",
    "lora_cache_optimal_adapter_size": "8",
    "lora_cache_max_adapter_size": "64",
    "lora_cache_gpu_memory_fraction": "0.05",
    "lora_cache_host_memory_bytes": "1073741824",
    "enable_context_fmha_fp32_acc": "false",
    "multi_block_mode": "true",
    "cuda_graph_mode": "false",
    "cuda_graph_cache_size": "0",
    "speculative_decoding_fast_logits": "false",
    "executor_worker_path": "/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
}


def write_tensorrtllm_repository(
    build_directory: Path,
    destination: Path,
    pipeline: Any,
    *,
    engine: Path,
    limits: EngineLimits,
    choices: Sequence[Sequence[int]],
    sliding_window: int | None,
) -> None:
    """Write ``preprocessing``, ``tensorrt_llm``, ``postprocessing``, ``ensemble`` and ``serve.sh``.

    ``engine`` is named by its full path, which is all that the backend understands; the rest of the repository can be
    moved together with the checkpoint beside it.
    """
    tokenizer = {"tokenizer_dir": TOKENIZER_PATH}
    chat_template = publish_chat_template(load_tokenizer(build_directory / "checkpoint"))
    parameters = {
        "preprocessing": {**tokenizer, "add_special_tokens": "true", **chat_template},
        "tensorrt_llm": engine_parameters(pipeline, engine.resolve(), limits, choices, sliding_window),
        "postprocessing": {**tokenizer, "skip_special_tokens": "true"},
        "ensemble": {},
    }
    for model in CLASSIC_MODELS:
        write_model(destination / model.name, model, pipeline.engine.max_batch_size, parameters[model.name])
    write_tensorrtllm_script(destination, pipeline, engine.resolve())


def engine_parameters(
    pipeline: Any, engine: Path, limits: EngineLimits, choices: Sequence[Sequence[int]], sliding_window: int | None
) -> dict[str, str]:
    """Return the parameters of the model ``tensorrt_llm``."""
    cache = pipeline.kv_cache
    parameters = DEFAULTS | {
        "gpt_model_path": str(engine),
        "kv_cache_free_gpu_mem_fraction": str(cache.free_gpu_memory_fraction),
        "max_tokens_in_paged_kv_cache": str(cache.block_size * cache.max_blocks),
        "enable_kv_cache_reuse": "true" if cache.prefix_cache else "false",
        "enable_chunked_context": "true" if limits.chunks_prefill else "false",
        "decoding_mode": DECODING_MODES[limits.method],
    }
    if sliding_window is not None:
        parameters["max_attention_window_size"] = str(sliding_window)
    if limits.method is not None:
        parameters[CHOICES[limits.method]] = write_choices(choices)
    return parameters


def write_choices(choices: Sequence[Sequence[int]]) -> str:
    """Write a static tree as the backend reads it.

    >>> write_choices([(0,), (0, 2)])
    '{0},{0,2}'
    """
    return ",".join("{" + ",".join(map(str, path)) + "}" for path in choices)


def without(model: Model, names: Collection[str]) -> Model:
    """Return ``model`` without the tensors of these names, and without the wires of its steps that join them."""

    def kept(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in tensors if tensor.name not in names)

    def kept_wires(wires: Mapping[str, str]) -> dict[str, str]:
        return {name: wire for name, wire in wires.items() if name not in names}

    steps = tuple(Step(step.model, kept_wires(step.inputs), kept_wires(step.outputs)) for step in model.steps)
    return replace(model, inputs=kept(model.inputs), outputs=kept(model.outputs), steps=steps)


def _classic(model: Model) -> Model:
    classic = without(model, ADDITIONS)
    if model.name != "tensorrt_llm":
        return classic
    return replace(classic, backend="tensorrtllm", dynamic_batching=True)


CLASSIC_MODELS = tuple(map(_classic, MODELS))

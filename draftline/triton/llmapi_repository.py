"""The model repository of TensorRT-LLM from 1.3 on: its ``llmapi`` model, and the classic names before it.

Source: TensorRT-LLM's LLM API reference (``TorchLlmArgs``, ``KvCacheConfig``, ``Eagle3DecodingConfig`` and its
siblings) and ``triton_backend/all_models/llmapi/tensorrt_llm/1/model.yaml``. The names of settings live here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from draftline.checkpoints.tokenizer import Tokenizer
from draftline.triton.addresses import local_address
from draftline.triton.chat import publish_chat_template
from draftline.triton.llmapi_contract import FRONT, LLMAPI
from draftline.triton.repository import write_model
from draftline.triton.serve_script import write_llmapi_script

MODEL_FILE = "model.yaml"
DECODING_TYPES = {"eagle3": "Eagle3", "draft_model": "Draft_Target", "ngram": "NGram"}
OVERLAPPING = ("eagle3",)  # drafts inside the target's own forward; the others need the step's tokens on the host
MAX_MATCHING_NGRAM_SIZE = 4  # as draftline's own n-gram drafter looks up


def write_llmapi_repository(
    destination: Path,
    pipeline: Any,
    target: Path,
    draft: Path | None,
    captured_layers: Sequence[int],
    tokenizer: Tokenizer,
) -> None:
    """Write ``tensorrt_llm`` with its ``model.yaml``, ``ensemble`` and ``serve.sh``.

    ``target`` and ``draft`` are folders with full paths, which TensorRT-LLM reads where it runs. The chat template of
    ``tokenizer`` is published in the configuration of ``ensemble``.
    """
    write_model(destination / LLMAPI.name, LLMAPI, 0, {}, folder="llmapi")
    settings = model_settings(pipeline, target, draft, captured_layers)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    (destination / LLMAPI.name / "1" / MODEL_FILE).write_text(text, encoding="utf-8")
    parameters = {
        "llmapi_address": local_address(pipeline.serve.host, pipeline.serve.http_port),
        "max_requests": str(pipeline.engine.max_batch_size),
        "cancellation_check_period_ms": "100",
        **publish_chat_template(tokenizer),
    }
    write_model(destination / FRONT.name, FRONT, 1, parameters, folder="llmapi")
    write_llmapi_script(destination, pipeline)


def model_settings(pipeline: Any, target: Path, draft: Path | None, captured_layers: Sequence[int]) -> dict[str, Any]:
    """Return ``model.yaml``: the arguments of TensorRT-LLM's ``LLM``, and what Triton is told."""
    engine, cache = pipeline.engine, pipeline.kv_cache
    settings: dict[str, Any] = {
        "model": str(target),
        "backend": "pytorch",
        "dtype": pipeline.target.dtype,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "max_batch_size": engine.max_batch_size,
        "max_seq_len": engine.max_seq_len,
        "max_num_tokens": engine.max_num_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": not pipeline.draft,
        "kv_cache_config": {
            "enable_block_reuse": cache.prefix_cache,
            "max_tokens": cache.block_size * cache.max_blocks,
            "free_gpu_memory_fraction": cache.free_gpu_memory_fraction,
            "tokens_per_block": cache.block_size,
        },
    }
    if pipeline.draft:
        method = pipeline.draft[0].method
        if method not in OVERLAPPING:
            settings["disable_overlap_scheduler"] = True
        settings["speculative_config"] = speculative_config(pipeline, draft, captured_layers)
    settings["triton_config"] = {"max_batch_size": 0, "decoupled": True}
    return settings


def speculative_config(pipeline: Any, draft: Path | None, captured_layers: Sequence[int]) -> dict[str, Any]:
    """Return ``speculative_config``. Its ``max_draft_len`` is a depth, not a number of draft tokens."""
    tree, method = pipeline.tree, pipeline.draft[0].method
    settings: dict[str, Any] = {"decoding_type": DECODING_TYPES[method], "max_draft_len": tree.max_depth}
    if draft is not None:
        settings["speculative_model"] = str(draft)
    if method == "eagle3":
        settings["eagle3_layers_to_capture"] = list(captured_layers)
        if tree.kind == "dynamic":
            settings["use_dynamic_tree"] = True
            settings["dynamic_tree_max_topK"] = tree.top_k
            settings["max_total_draft_tokens"] = tree.max_nodes - 1
    if method == "ngram":
        settings["max_matching_ngram_size"] = MAX_MATCHING_NGRAM_SIZE
        settings["is_use_oldest"] = False  # the latest occurrence, in the request's own text
        settings["is_public_pool"] = False
    return settings

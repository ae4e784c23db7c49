"""The wire contract of TensorRT-LLM's ``llmapi`` Triton model, and how the classic names are told in its words.

**Source**: TensorRT-LLM ``triton_backend/all_models/llmapi/tensorrt_llm`` (``config.pbtxt``, ``helpers.py``) and its
releases from 1.3 on. Vendor names live here and nowhere else. The model takes one prompt per request, without a batch
dimension, so no Triton ensemble can stand before it: ``ensemble`` is a model of its own that renames tensors.
"""

from __future__ import annotations

from dataclasses import replace

from draftline.triton.contract import ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS, DataType, Model, Scalar, Tensor


def _optional(name: str, datatype: DataType, dims: tuple[int, ...] = (1,)) -> Tensor:
    return Tensor(name, datatype, dims)


INPUTS = (
    Tensor("text_input", "STRING", (-1,), optional=False),
    _optional("image_url", "STRING", (-1,)),
    _optional("streaming", "BOOL"),
    _optional("sampling_param_best_of", "INT32"),
    _optional("sampling_param_temperature", "FP32"),
    _optional("sampling_param_top_k", "INT32"),
    _optional("sampling_param_top_p", "FP32"),
    _optional("sampling_param_frequency_penalty", "FP32"),
    _optional("sampling_param_presence_penalty", "FP32"),
    _optional("sampling_param_max_tokens", "INT32"),
    _optional("sampling_param_stop", "STRING", (-1,)),
    _optional("sampling_param_seed", "UINT64"),
    _optional("sampling_param_exclude_input_from_output", "BOOL"),
    _optional("sampling_param_return_perf_metrics", "BOOL"),
    _optional("return_finish_reason", "BOOL"),
    _optional("return_stop_reason", "BOOL"),
    _optional("return_cumulative_logprob", "BOOL"),
    _optional("stop", "BOOL"),
    _optional("lora_id", "UINT64"),
    _optional("lora_name", "STRING"),
    _optional("lora_path", "STRING"),
    _optional("lora_ckpt_source", "STRING"),
)
OUTPUTS = (
    _optional("text_output", "STRING", (-1,)),
    _optional("finish_reason", "STRING", (-1,)),
    _optional("stop_reason", "STRING", (-1,)),
    _optional("cumulative_logprob", "FP32", (-1,)),
    _optional("kv_cache_reused_block", "INT32", (-1,)),
    _optional("kv_cache_missed_block", "INT32", (-1,)),
    _optional("kv_cache_alloc_new_blocks", "INT32", (-1,)),
    _optional("kv_cache_alloc_total_blocks", "INT32", (-1,)),
    _optional("kv_cache_hit_rate", "FP32", (-1,)),
    _optional("arrival_time_ns", "INT64"),
    _optional("first_scheduled_time_ns", "INT64"),
    _optional("first_token_time_ns", "INT64"),
    _optional("last_token_time_ns", "INT64"),
    _optional("acceptance_rate", "FP32"),
    _optional("total_accepted_draft_tokens", "INT32"),
    _optional("total_draft_tokens", "INT32"),
)
LLMAPI = Model("tensorrt_llm", INPUTS, OUTPUTS, decoupled=True, batches=False)

# The classic input -> the model's. Only these have a meaning there.
INPUT_NAMES = {
    "text_input": "text_input",
    "max_tokens": "sampling_param_max_tokens",
    "stop_words": "sampling_param_stop",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "presence_penalty": "sampling_param_presence_penalty",
    "frequency_penalty": "sampling_param_frequency_penalty",
    "seed": "sampling_param_seed",
    "random_seed": "sampling_param_seed",
    "exclude_input_in_output": "sampling_param_exclude_input_from_output",
    "return_perf_metrics": "sampling_param_return_perf_metrics",
    "stream": "streaming",
}
# The model's output -> the classic one.
OUTPUT_NAMES = {
    "text_output": "text_output",
    "kv_cache_reused_block": "kv_cache_reused_blocks",
    **{
        name: name
        for name in (
            "kv_cache_alloc_new_blocks",
            "kv_cache_alloc_total_blocks",
            "arrival_time_ns",
            "first_scheduled_time_ns",
            "first_token_time_ns",
            "last_token_time_ns",
            "acceptance_rate",
            "total_accepted_draft_tokens",
            "total_draft_tokens",
        )
    },
}
# The other classic inputs are declared and accepted at values that mean nothing, here or without beams.
NEUTRAL: dict[str, tuple[Scalar, ...]] = {
    "num_return_sequences": (1,),
    "beam_width": (1,),
    "length_penalty": (0.0, 1.0),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "min_length": (0,),
    "return_log_probs": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_num_input_tokens": (False,),
    "return_num_output_tokens": (False,),
    "return_acceptance": (False,),
    "speculate": (True,),
    "prompt_vocab_size": (0,),
}
IGNORED = ("pad_id",)  # one sequence is not padded
STOP = "stop"  # with the id of a running request: ends it


def _front_input(tensor: Tensor) -> Tensor:
    if tensor.name in INPUT_NAMES or tensor.name in IGNORED:
        return replace(tensor, ragged=False, neutral=None)
    return replace(tensor, ragged=False, neutral=NEUTRAL.get(tensor.name, ()))


FRONT = Model(
    "ensemble",
    (*map(_front_input, ENSEMBLE_INPUTS), _optional(STOP, "BOOL")),
    tuple(tensor for tensor in ENSEMBLE_OUTPUTS if tensor.name in OUTPUT_NAMES.values()),
    decoupled=True,
)

"""The wire contract of TensorRT-LLM's classic Triton ensemble, as data.

**Source**: TensorRT-LLM ``triton_backend/all_models/inflight_batcher_llm`` (the last release that shipped it), plus the
spellings of earlier releases (``min_length``, ``random_seed``). Vendor names live here and nowhere else.

An input with ``neutral`` set is declared but not served by this version: it is accepted when it is absent, empty, or
holds only neutral values, and refused by name otherwise.

Additions to the classic contract; a client that never heard of them sees no difference:

- ``tensorrt_llm`` has an output ``output_text``, wired to the optional postprocessing input ``TEXT``: the engine
  owns incremental detokenisation (decoding streamed chunks in isolation loses spaces and splits multi-byte characters).
- ``speculate`` False decodes plainly, ``max_draft_tokens`` caps the draft tokens of a step. Neither changes the answer
  where acceptance is exact.
- ``return_acceptance`` asks for ``token_texts`` and ``is_draft``, one element per token of the response: joined, the
  texts are the new part of ``text_output``; text that was held back when the last token came follows as one element
  more. The last response also carries the counts of ``SPECULATION_OUTPUTS`` and ``acceptance_histogram``: element a
  is the number of steps that accepted exactly a draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataType = Literal["STRING", "BOOL", "INT32", "INT64", "UINT8", "UINT64", "FP16", "FP32"]
Scalar = float | int | bool | str


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model; ``dims`` without the batch dimension. ``scalar``: ``dims [1]`` reshaped to ``[]``."""

    name: str
    datatype: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = True
    ragged: bool = False
    scalar: bool = False
    neutral: tuple[Scalar, ...] | None = None


def _required(name: str, datatype: DataType, dims: tuple[int, ...] = (1,), *, scalar: bool = False) -> Tensor:
    return Tensor(name, datatype, dims, optional=False, scalar=scalar)


def _scalar(name: str, datatype: DataType, neutral: tuple[Scalar, ...] | None = None) -> Tensor:
    return Tensor(name, datatype, scalar=True, neutral=neutral)


def _ragged(
    name: str, datatype: DataType, dims: tuple[int, ...] = (-1,), neutral: tuple[Scalar, ...] | None = ()
) -> Tensor:
    return Tensor(name, datatype, dims, ragged=True, neutral=neutral)


# Without beams a length penalty divides every score alike, so 0 and 1 mean the same: nothing.
_NO_LENGTH_PENALTY = (0.0, 1.0)
# TensorRT-LLM's default of top_p_min; it acts only together with a top_p_decay.
_NO_TOP_P_MIN = (0.0, 1e-6)

PREPROCESSING_INPUTS = (
    _required("QUERY", "STRING"),
    Tensor("DECODER_QUERY", "STRING", neutral=()),
    _required("REQUEST_OUTPUT_LEN", "INT32"),
    Tensor("BAD_WORDS_DICT", "STRING", (-1,)),
    Tensor("STOP_WORDS_DICT", "STRING", (-1,)),
    Tensor("EMBEDDING_BIAS_WORDS", "STRING", (-1,)),
    Tensor("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
    Tensor("END_ID", "INT32"),
    Tensor("PAD_ID", "INT32"),
    Tensor("PROMPT_TABLE_EXTRA_ID", "UINT64", neutral=()),
)
PREPROCESSING_OUTPUTS = (
    _required("INPUT_ID", "INT32", (-1,)),
    _required("REQUEST_INPUT_LEN", "INT32"),
    _required("DECODER_INPUT_ID", "INT32", (-1,)),
    _required("REQUEST_DECODER_INPUT_LEN", "INT32"),
    _required("BAD_WORDS_IDS", "INT32", (2, -1)),
    _required("STOP_WORDS_IDS", "INT32", (2, -1)),
    _required("EMBEDDING_BIAS", "FP32", (-1,)),
    _required("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    _required("OUT_END_ID", "INT32"),
    _required("OUT_PAD_ID", "INT32"),
    _required("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64"),
)

GENERATION_INPUTS = (
    _ragged("input_ids", "INT32", neutral=None),
    _ragged("encoder_input_features", "FP16", (-1, -1)),
    _scalar("encoder_output_lengths", "INT32", (0,)),
    _required("input_lengths", "INT32", scalar=True),
    _required("request_output_len", "INT32", scalar=True),
    _scalar("num_return_sequences", "INT32", (1,)),
    _ragged("draft_input_ids", "INT32"),
    _ragged("decoder_input_ids", "INT32"),
    _scalar("decoder_input_lengths", "INT32", (0,)),
    _ragged("draft_logits", "FP32", (-1, -1)),
    _scalar("draft_acceptance_threshold", "FP32", ()),
    _scalar("end_id", "INT32"),
    _scalar("pad_id", "INT32"),
    _ragged("stop_words_list", "INT32", (2, -1), neutral=None),
    _ragged("bad_words_list", "INT32", (2, -1), neutral=None),
    _ragged("embedding_bias", "FP32", neutral=None),
    _scalar("beam_width", "INT32", (1,)),
    _scalar("temperature", "FP32"),
    _scalar("runtime_top_k", "INT32"),
    _scalar("runtime_top_p", "FP32"),
    _scalar("runtime_top_p_min", "FP32", _NO_TOP_P_MIN),
    _scalar("runtime_top_p_decay", "FP32", (1.0,)),
    _scalar("runtime_top_p_reset_ids", "INT32", (-1,)),
    _scalar("len_penalty", "FP32", _NO_LENGTH_PENALTY),
    _scalar("early_stopping", "BOOL", (False,)),
    _scalar("repetition_penalty", "FP32"),
    _scalar("min_tokens", "INT32"),
    _scalar("min_length", "INT32"),
    _scalar("beam_search_diversity_rate", "FP32", (0.0,)),
    _scalar("presence_penalty", "FP32"),
    _scalar("frequency_penalty", "FP32"),
    _scalar("seed", "UINT64"),
    _scalar("random_seed", "UINT64"),
    _scalar("return_log_probs", "BOOL"),
    _scalar("return_context_logits", "BOOL", (False,)),
    _scalar("return_generation_logits", "BOOL"),
    _scalar("return_perf_metrics", "BOOL"),
    _scalar("return_num_input_tokens", "BOOL"),
    _scalar("return_num_output_tokens", "BOOL"),
    _scalar("exclude_input_in_output", "BOOL"),
    _scalar("stop", "BOOL"),
    _scalar("streaming", "BOOL"),
    _ragged("prompt_embedding_table", "FP16", (-1, -1)),
    _ragged("prompt_table_extra_ids", "UINT64"),
    _scalar("prompt_vocab_size", "INT32", (0,)),
    _ragged("cross_attention_mask", "BOOL", (-1, -1)),
    Tensor("mrope_rotary_cos_sin", "FP32", (-1,), neutral=()),
    Tensor("mrope_position_deltas", "INT64", neutral=()),
    _scalar("lora_task_id", "UINT64", ()),
    _ragged("lora_weights", "FP16", (-1, -1)),
    _ragged("lora_config", "INT32", (-1, 3)),
    _ragged("context_phase_params", "UINT8"),
    _ragged("skip_cross_attn_blocks", "BOOL", (1,), (False,)),
    _ragged("retention_token_range_starts", "INT32"),
    _ragged("retention_token_range_ends", "INT32"),
    _ragged("retention_token_range_priorities", "INT32"),
    _ragged("retention_token_range_durations_ms", "INT32"),
    _ragged("retention_decode_priority", "INT32", (1,)),
    _ragged("retention_decode_duration_ms", "INT32", (1,)),
    _ragged("guided_decoding_guide_type", "STRING", (1,)),
    _ragged("guided_decoding_guide", "STRING", (1,)),
    _ragged("lookahead_window_size", "INT32", (1,)),
    _ragged("lookahead_ngram_size", "INT32", (1,)),
    _ragged("lookahead_verification_set_size", "INT32", (1,)),
    _scalar("speculate", "BOOL"),
    _scalar("max_draft_tokens", "INT32"),
    _scalar("return_acceptance", "BOOL"),
)

# What return_acceptance brings with the last response, beside acceptance_rate and the two totals: output -> attribute
# of ``draftline.runtime.speculation_numbers.SpeculationNumbers``.
SPECULATION_OUTPUTS = {
    "total_verified_draft_tokens": "num_verified_tokens",
    "total_emitted_tokens": "num_emitted_tokens",
    "num_draft_forwards": "num_draft_forwards",
    "num_target_forwards": "num_target_forwards",
}
# What a client asks for with return_*, beside the tokens: names shared by tensorrt_llm and the ensemble.
_REPORT_OUTPUTS = (
    _required("cum_log_probs", "FP32", (-1,)),
    _required("output_log_probs", "FP32", (-1, -1)),
    _required("context_logits", "FP32", (-1, -1)),
    _required("generation_logits", "FP32", (-1, -1, -1)),
    _required("batch_index", "INT32"),
    _required("sequence_index", "INT32"),
    _required("kv_cache_alloc_new_blocks", "INT32"),
    _required("kv_cache_reused_blocks", "INT32"),
    _required("kv_cache_alloc_total_blocks", "INT32"),
    _required("arrival_time_ns", "INT64"),
    _required("first_scheduled_time_ns", "INT64"),
    _required("first_token_time_ns", "INT64"),
    _required("last_token_time_ns", "INT64"),
    _required("acceptance_rate", "FP32"),
    _required("total_accepted_draft_tokens", "INT32"),
    _required("total_draft_tokens", "INT32"),
    _required("num_input_tokens", "INT32"),
    _required("num_output_tokens", "INT32"),
    _required("token_texts", "STRING", (-1,)),
    _required("is_draft", "BOOL", (-1,)),
    _required("acceptance_histogram", "INT32", (-1,)),
    *(_required(name, "INT32") for name in SPECULATION_OUTPUTS),
)
GENERATION_OUTPUTS = (
    _required("output_ids", "INT32", (-1, -1)),
    _required("sequence_length", "INT32", (-1,)),
    *_REPORT_OUTPUTS,
    _required("context_phase_params", "UINT8", (-1,)),
    _required("output_text", "STRING", (-1,)),
)

POSTPROCESSING_INPUTS = (
    _required("TOKENS_BATCH", "INT32", (-1, -1)),
    _required("SEQUENCE_LENGTH", "INT32", (-1,)),
    Tensor("TEXT", "STRING", (-1,)),
)
POSTPROCESSING_OUTPUTS = (_required("OUTPUT", "STRING", (-1,)),)

ENSEMBLE_INPUTS = (
    _required("text_input", "STRING"),
    Tensor("decoder_text_input", "STRING"),
    _required("max_tokens", "INT32"),
    Tensor("num_return_sequences", "INT32"),
    Tensor("bad_words", "STRING", (-1,)),
    Tensor("stop_words", "STRING", (-1,)),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("temperature", "FP32"),
    Tensor("length_penalty", "FP32"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("min_tokens", "INT32"),
    Tensor("min_length", "INT32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("random_seed", "UINT64"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("return_context_logits", "BOOL"),
    Tensor("return_generation_logits", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    Tensor("beam_width", "INT32"),
    Tensor("stream", "BOOL"),
    Tensor("prompt_embedding_table", "FP16", (-1, -1)),
    Tensor("prompt_table_extra_id", "UINT64"),
    Tensor("prompt_vocab_size", "INT32"),
    Tensor("embedding_bias_words", "STRING", (-1,)),
    Tensor("embedding_bias_weights", "FP32", (-1,)),
    Tensor("lora_task_id", "UINT64"),
    Tensor("lora_weights", "FP16", (-1, -1), ragged=True),
    Tensor("lora_config", "INT32", (-1, 3), ragged=True),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("speculate", "BOOL"),
    Tensor("max_draft_tokens", "INT32"),
    Tensor("return_acceptance", "BOOL"),
)
ENSEMBLE_OUTPUTS = (_required("text_output", "STRING", (-1,)), *_REPORT_OUTPUTS)


@dataclass(frozen=True)
class Step:
    """A step of the ensemble: ``inputs`` and ``outputs`` map the model's tensor names to the ensemble's."""

    model: str
    inputs: dict[str, str]
    outputs: dict[str, str]


def _same_names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


ENSEMBLE_STEPS = (
    Step(
        "preprocessing",
        {
            "QUERY": "text_input",
            "DECODER_QUERY": "decoder_text_input",
            "REQUEST_OUTPUT_LEN": "max_tokens",
            "BAD_WORDS_DICT": "bad_words",
            "STOP_WORDS_DICT": "stop_words",
            "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
            "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
            "END_ID": "end_id",
            "PAD_ID": "pad_id",
            "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
        },
        {
            "INPUT_ID": "_INPUT_ID",
            "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
            "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
            "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
            "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
            "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
            "OUT_END_ID": "_OUT_END_ID",
            "OUT_PAD_ID": "_OUT_PAD_ID",
        },
    ),
    Step(
        "tensorrt_llm",
        {
            "input_ids": "_INPUT_ID",
            "input_lengths": "_REQUEST_INPUT_LEN",
            "request_output_len": "_REQUEST_OUTPUT_LEN",
            "bad_words_list": "_BAD_WORDS_IDS",
            "stop_words_list": "_STOP_WORDS_IDS",
            "embedding_bias": "_EMBEDDING_BIAS",
            "end_id": "_OUT_END_ID",
            "pad_id": "_OUT_PAD_ID",
            "runtime_top_k": "top_k",
            "runtime_top_p": "top_p",
            "len_penalty": "length_penalty",
            "streaming": "stream",
            **_same_names(
                "num_return_sequences",
                "exclude_input_in_output",
                "temperature",
                "repetition_penalty",
                "min_tokens",
                "min_length",
                "presence_penalty",
                "frequency_penalty",
                "seed",
                "random_seed",
                "return_log_probs",
                "return_context_logits",
                "return_generation_logits",
                "return_perf_metrics",
                "return_num_input_tokens",
                "return_num_output_tokens",
                "beam_width",
                "prompt_embedding_table",
                "prompt_vocab_size",
                "lora_task_id",
                "lora_weights",
                "lora_config",
                "guided_decoding_guide_type",
                "guided_decoding_guide",
                "speculate",
                "max_draft_tokens",
                "return_acceptance",
            ),
        },
        {
            "output_ids": "_TOKENS_BATCH",
            "sequence_length": "_SEQUENCE_LENGTH",
            "output_text": "_TEXT",
            **_same_names(*(tensor.name for tensor in _REPORT_OUTPUTS)),
        },
    ),
    Step(
        "postprocessing",
        {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH", "TEXT": "_TEXT"},
        {"OUTPUT": "text_output"},
    ),
)


@dataclass(frozen=True)
class Model:
    """A model of the repository: its tensors and whether it may send any number of responses.

    ``batches``: tensors have a batch dimension, which ``dims`` leave out. ``dynamic_batching``: Triton gathers
    requests.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    decoupled: bool = False
    steps: tuple[Step, ...] = ()
    backend: str = "python"
    batches: bool = True
    dynamic_batching: bool = False


MODELS = (
    Model("preprocessing", PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS),
    Model("tensorrt_llm", GENERATION_INPUTS, GENERATION_OUTPUTS, decoupled=True),
    Model("postprocessing", POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS),
    Model("ensemble", ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS, steps=ENSEMBLE_STEPS),
)

# The client's name of every model input that the ensemble feeds from a client's input under another name.
CLIENT_NAMES = {
    model_name: ensemble_name
    for step in ENSEMBLE_STEPS
    for model_name, ensemble_name in step.inputs.items()
    if not ensemble_name.startswith("_")
}

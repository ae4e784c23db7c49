"""``config.json`` to ``CheckpointConfig``: both spellings, class defaults, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = MISTRAL | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = MISTRAL | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 16,
    "truncate": False,
}


def parse(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> CheckpointConfig:
    extra = None if generation is None else JsonObject(Path("generation_config.json"), generation)
    return parse_huggingface_config(JsonObject(Path("config.json"), raw), extra, "float32")


def test_a_llama_of_the_first_days_takes_the_defaults_of_its_class() -> None:
    config = parse(LLAMA)
    assert (config.num_key_value_heads, config.head_size, config.rotary_base) == (4, 16, 10000.0)
    assert (config.qkv_bias, config.share_embedding_table, config.sliding_window) == (False, False, None)


def test_biases_and_norms_follow_the_architecture() -> None:
    def features(raw: dict[str, Any]) -> tuple[bool, bool, bool, bool]:
        config = parse(raw)
        return config.qkv_bias, config.dense_bias, config.mlp_bias, config.qk_norm

    assert features(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True, False)
    assert features(MISTRAL | {"attention_bias": True}) == (False, False, False, False)  # the class has no such key
    assert features(QWEN2) == (True, False, False, False)
    assert features(QWEN3) == (False, False, False, True)
    assert features(QWEN3 | {"attention_bias": True}) == (True, True, False, True)


def test_the_model_type_serves_where_architectures_is_absent() -> None:
    raw = {key: value for key, value in QWEN2.items() if key != "architectures"} | {"model_type": "qwen2"}
    assert parse(raw).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize("scaling", [LLAMA3_ROPE, YARN, {"rope_type": "linear", "factor": 2.0}])
def test_both_spellings_of_rotary_parameters_agree(scaling: dict[str, Any]) -> None:
    legacy = {key: value for key, value in scaling.items() if key != "rope_type"} | {"type": scaling["rope_type"]}
    before = parse(LLAMA | {"rope_theta": 5e5, "rope_scaling": legacy})
    after = parse(LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}})
    assert before == after
    assert (after.rotary_base, after.rotary_scaling) == (5e5, scaling)


def test_yarn_takes_the_trained_length_from_the_configuration() -> None:
    scaling = parse(LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}).rotary_scaling
    assert scaling == {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8192}


def test_the_default_type_scales_nothing() -> None:
    config = parse(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (config.rotary_base, config.rotary_scaling) == (1e6, None)


def test_windows() -> None:
    assert parse(MISTRAL).sliding_window == 4096  # what the class does
    assert parse(MISTRAL | {"sliding_window": None}).sliding_window is None
    assert parse(QWEN2 | {"sliding_window": 128}).sliding_window is None
    switched = QWEN2 | {"use_sliding_window": True, "sliding_window": 128}
    assert parse(switched | {"max_window_layers": 0}).sliding_window == 128
    assert parse(switched | {"max_window_layers": 4}).sliding_window is None
    with pytest.raises(CheckpointError, match="all layers attend to one window"):
        parse(switched | {"max_window_layers": 2})
    with pytest.raises(CheckpointError, match="all layers attend to one window"):
        parse(switched | {"layer_types": ["full_attention", "sliding_attention"] * 2})


def test_end_ids_come_from_the_generation_config_first() -> None:
    assert parse(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert parse(LLAMA | {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
    assert parse(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert parse(LLAMA | {"eos_token_id": 2}, {}).eos_token_ids == (2,)
    assert parse(LLAMA).eos_token_ids == ()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (LLAMA | {"architectures": ["GemmaForCausalLM"]}, r'architectures is one of .*; got \["Gemma'),
    "model type": ({"model_type": "gpt2"}, "gpt2"),
    "quantised": (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
    "longrope": (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    "rope key": (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 3}}, "unknown keys alpha"),
    "rope factor": (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor is a positive number; got nothing"),
    "rope per layer": (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one mapping"),
    "partial": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "head_dim": ({key: value for key, value in QWEN3.items() if key != "head_dim"}, "head_dim"),
    "odd head": (LLAMA | {"head_dim": 15}, "even"),
    "heads": (LLAMA | {"num_key_value_heads": 3}, "divisor"),
    "type": (LLAMA | {"hidden_size": "64"}, 'hidden_size is a positive integer; got "64"'),
    "boolean": (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers"),
    "missing": ({key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}, "rms_norm_eps"),
    "eos": (LLAMA | {"eos_token_id": "2"}, "eos_token_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_graphs_cannot_compute_is_refused_by_name(case: str) -> None:
    raw, rule = REFUSED[case]
    with pytest.raises(CheckpointError, match=rule) as caught:
        parse(raw)
    assert str(caught.value).startswith("config.json: ")

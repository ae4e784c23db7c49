"""``config.json`` to ``CheckpointConfig``: both spellings, class defaults, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.config import CheckpointConfig, Experts
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.trtllm import parse_config, write_checkpoint_config
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
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 2,
}
GEMMA2 = GEMMA3 | {"architectures": ["Gemma2ForCausalLM"]}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0 + i for i in range(6)]}
PHI4_MINI = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 4096,
    "rope_scaling": LONGROPE,
}
MIXTRAL = MISTRAL | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = MISTRAL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
GPT_OSS = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "rope_theta": 150000,
    "rope_scaling": YARN_OF_GPT_OSS,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
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
    some = parse(switched | {"max_window_layers": 2})
    assert (some.sliding_window, some.full_layers) == (128, (0, 1))
    assert [some.window(layer) for layer in range(4)] == [0, 0, 128, 128]
    mixed = {"layer_types": ["full_attention", "sliding_attention"] * 2}
    assert parse(switched | mixed).full_layers == (0, 2)
    assert parse(MISTRAL | {"architectures": ["MinistralForCausalLM"]} | mixed).full_layers == (0, 2)
    assert parse(MISTRAL | {"layer_types": ["sliding_attention"] * 4}).sliding_window == 4096


def test_experts() -> None:
    assert parse(QWEN3).experts is None
    mixtral = parse(MIXTRAL | {"router_jitter_noise": 0.1})  # a training's
    assert mixtral.experts == Experts(8, 2, 96, renormalises=True)
    assert (mixtral.rotary_base, mixtral.sliding_window, mixtral.qk_norm) == (1e6, None, False)
    qwen = parse(QWEN3_MOE | {"attention_bias": True})
    assert qwen.experts == Experts(16, 4, 24, renormalises=True)
    assert (qwen.qk_norm, qwen.qkv_bias, qwen.dense_bias, qwen.rotary_base) == (True, True, True, 10000.0)
    assert (qwen.head_size, qwen.sliding_window, qwen.intermediate_size) == (16, None, 96)
    of_class = {key: value for key, value in QWEN3_MOE.items() if key not in ("norm_topk_prob", "mlp_only_layers")}
    assert parse(of_class).experts == Experts(16, 4, 24, renormalises=False)
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 16}
    assert parse(renamed) == parse(QWEN3_MOE)  # what transformers 5 writes


def test_gpt_oss_takes_what_its_class_adds() -> None:
    config = parse(GPT_OSS)
    assert config.experts == Experts(32, 4, 96, renormalises=True, has_biases=True, gate_limit=7.0)
    assert (config.attention_sinks, config.qkv_bias, config.dense_bias, config.mlp_bias) == (True, True, True, False)
    assert (config.sliding_window, config.full_layers, config.hidden_act) == (128, (1, 3), "silu")
    assert (config.rotary_base, config.rotary_scaling) == (150000.0, YARN_OF_GPT_OSS)
    optional = ("attention_bias", "sliding_window", "swiglu_limit", "rope_theta")
    assert parse({key: value for key, value in GPT_OSS.items() if key not in optional}) == config
    kinds = ["sliding_attention", "full_attention"] * 2
    assert parse(GPT_OSS | {"layer_types": kinds, "swiglu_alpha": 1.702}) == config
    plain = parse(GPT_OSS | {"attention_bias": False, "rope_scaling": {"rope_type": "default"}, "swiglu_limit": 2.5})
    assert (plain.qkv_bias, plain.dense_bias, plain.rotary_scaling) == (False, False, None)
    assert plain.experts is not None
    assert plain.experts.gate_limit == 2.5


def test_end_ids_come_from_the_generation_config_first() -> None:
    assert parse(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert parse(LLAMA | {"eos_token_id": [2, 5]}).eos_token_ids == (2, 5)
    assert parse(LLAMA | {"eos_token_id": 2}, {"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert parse(LLAMA | {"eos_token_id": 2}, {}).eos_token_ids == (2,)
    assert parse(LLAMA).eos_token_ids == ()


def test_gemma_takes_what_its_class_adds() -> None:
    config = parse(GEMMA3)
    assert (config.hidden_act, config.post_norms, config.qk_norm) == ("gelu_pytorch_tanh", True, True)
    assert (config.embedding_scale, config.query_pre_attn_scalar) == (8.0, 256.0)
    assert config.share_embedding_table, "its class ties them where the key is absent"
    assert not parse(GEMMA3 | {"tie_word_embeddings": False}).share_embedding_table
    assert (config.sliding_window, config.full_layers) == (512, (1, 3))
    assert (config.rotary_base, config.local_rotary_base) == (1e6, 1e4)
    assert (config.attention_softcap, config.logit_softcap) == (None, None)
    assert parse(GEMMA3 | {"final_logit_softcapping": 30.0}).logit_softcap == 30.0
    without = {key: value for key, value in GEMMA3.items() if key != "sliding_window_pattern"}
    assert parse(without | {"num_hidden_layers": 7}).full_layers == (5,), "each sixth"


def test_gemma_2_caps_scores_and_logits_unless_its_configuration_says_null() -> None:
    config = parse(GEMMA2)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.full_layers, config.qk_norm, config.local_rotary_base) == ((1, 3), False, None)
    config = parse(GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0})
    assert (config.attention_softcap, config.logit_softcap) == (None, 5.0)


def test_gemma_scales_embeddings_as_its_dtype_can() -> None:
    raw = JsonObject(Path("config.json"), GEMMA3 | {"hidden_size": 640})
    scales = [parse_huggingface_config(raw, None, dtype).embedding_scale for dtype in ("float32", "bfloat16")]
    assert scales == [float(np.float32(640**0.5)), 25.25]


def test_both_spellings_of_windowed_rotary_parameters_agree() -> None:
    before = parse(GEMMA3 | {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": LLAMA3_ROPE})
    nested = {
        "full_attention": LLAMA3_ROPE | {"rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    assert parse(GEMMA3 | {"rope_parameters": nested}) == before
    assert (before.rotary_base, before.local_rotary_base, before.rotary_scaling) == (2e6, 5e3, LLAMA3_ROPE)


def test_phi_turns_a_part_of_its_heads_by_lists_of_factors() -> None:
    config = parse(PHI4_MINI)
    lists = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    expected = {"rope_type": "longrope", "original_max_position_embeddings": 4096.0, **lists}
    assert (config.rotary_fraction, config.rotary_size, config.rotary_scaling) == (0.75, 12, expected)
    for name in ("su", "yarn"):
        assert parse(PHI4_MINI | {"rope_scaling": LONGROPE | {"type": name}}) == config


@pytest.mark.parametrize(
    "raw", [LLAMA, QWEN3, GEMMA2, GEMMA3, PHI4_MINI, GPT_OSS], ids=lambda raw: raw["architectures"][0]
)
def test_a_converted_checkpoint_says_the_same(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = parse(raw)
    write_checkpoint_config(tmp_path / "config.json", config)
    assert parse_config(load_json(tmp_path / "config.json")) == config


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (LLAMA | {"architectures": ["NewForCausalLM"]}, r'architectures is one of .*; got \["New.*llmapi'),
    "images": (LLAMA | {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForCausalLM is its model of text"),
    "two": (LLAMA | {"architectures": ["LlamaForCausalLM", "PhiForCausalLM"]}, "PhiForCausalLM has layer norms"),
    "both ways": (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is false"),
    "gelu": (GEMMA3 | {"hidden_activation": "gelu"}, 'hidden_activation is "gelu_pytorch_tanh"'),
    "layers of a Mistral": (
        MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 2},
        r"layer_types is absent in a mistral.*MinistralForCausalLM",
    ),
    "kind of layer": (
        QWEN2 | {"layer_types": ["chunked_attention"] * 4},
        "layer_types is a list of 4 times full_attention or sliding_attention",
    ),
    "number of layers": (GEMMA3 | {"layer_types": ["full_attention"]}, "layer_types is a list of 4"),
    "no window": (GEMMA3 | {"sliding_window": None}, "sliding_window is a length where layers have windows"),
    "local scaling": (
        GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention.rope_type",
    ),
    "kinds of rope": (GEMMA3 | {"rope_parameters": {"chunked_attention": {}}}, "one mapping"),
    "query scale": (
        {key: value for key, value in GEMMA3.items() if key != "query_pre_attn_scalar"},
        "query_pre_attn_scalar is a positive number; got nothing",
    ),
    "longrope length": (
        PHI4_MINI | {"original_max_position_embeddings": None},
        "original_max_position_embeddings is a positive number; got nothing",
    ),
    "longrope factors": (
        PHI4_MINI | {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
        'long_factor is a list of 6 positive numbers; got "1 values"',
    ),
    "partial of Phi": (PHI4_MINI | {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1 or less"),
    "odd partial": (PHI4_MINI | {"partial_rotary_factor": 0.6}, "even"),
    "model type": ({"model_type": "gpt2"}, "gpt2"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
    "unknown rope": (LLAMA | {"rope_scaling": {"rope_type": "proportional"}}, "proportional"),
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
    "no experts": (MIXTRAL | {"num_local_experts": None}, "num_experts is a positive integer; got nothing"),
    "two counts": (QWEN3_MOE | {"num_local_experts": 8}, r"num_experts is num_local_experts \(8\); got 16"),
    "chosen experts": (MIXTRAL | {"num_experts_per_tok": 9}, r"at most the number of experts \(8\); got 9"),
    "dense layers": (QWEN3_MOE | {"mlp_only_layers": [0]}, r"every layer has experts; got .*mlp_only_layers \[0\]"),
    "sparse step": (QWEN3_MOE | {"decoder_sparse_step": 2}, "every layer has experts; got decoder_sparse_step 2"),
    "window of experts": (QWEN3_MOE | {"use_sliding_window": True}, "use_sliding_window is false"),
    "gate's slope": (GPT_OSS | {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.702; got 1.0"),
    "rotary of the class": (
        GPT_OSS | {"rope_scaling": None},
        "rope_scaling is stated of a gpt_oss, whose class scales",
    ),
    "eos": (LLAMA | {"eos_token_id": "2"}, "eos_token_id"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_graphs_cannot_compute_is_refused_by_name(case: str) -> None:
    raw, rule = REFUSED[case]
    with pytest.raises(CheckpointError, match=rule) as caught:
        parse(raw)
    assert str(caught.value).startswith("config.json: ")

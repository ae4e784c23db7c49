"""Logits and greedy ids of tiny checkpoints of every architecture equal those of ``transformers``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from draftline.checkpoints.trtllm import WEIGHTS_FILE
from draftline.generation import load_engine
from draftline.sessions.native_kernels import Kernels
from tests.sessions.tiny_engines import Text, build_tiny_engine, open_tiny_session, run_text
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Logits have a spread of about 2. Both sides compute in float32 in different orders: 1e-5 in practice.
TOLERANCE = 1e-4
NUM_GENERATED = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SWITCHED = {"use_sliding_window": True, "sliding_window": 16}
SOME_WINDOWS = {"extra_config": SWITCHED | {"max_window_layers": 1}}


def phi4_mini(original_length: int) -> dict[str, Any]:
    """Engines are for 256 tokens: of a shorter original length they have the factors of long texts."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 0.7 * i for i in range(6)]}
    return {
        "tie": True,
        "rope_scaling": {"type": "longrope", **factors},
        "extra_config": {"partial_rotary_factor": 0.75, "original_max_position_embeddings": original_length},
    }


class Case(NamedTuple):
    architecture: Architecture
    options: Mapping[str, Any] = MappingProxyType({})
    dtype: str = "float32"
    prompt_length: int = 40


CASES = {
    "llama": Case("llama"),
    "llama-tied": Case("llama", {"tie": True}),
    "llama-mha": Case("llama", {"kv_heads": 4}),
    "llama-one-head": Case("llama", {"heads": 1, "kv_heads": 1, "head_dim": 32}),
    "llama-head-dim": Case("llama", {"head_dim": 24, "heads": 4, "kv_heads": 1}),
    "llama-biases": Case("llama", {"extra_config": {"attention_bias": True, "mlp_bias": True}}),
    "llama-awkward-sizes": Case("llama", {"vocab_size": 267, "hidden_size": 96, "intermediate_size": 200, "heads": 6}),
    "llama-rope-theta": Case("llama", {"rope_theta": 5e5}),
    "llama-llama3": Case("llama", {"rope_scaling": LLAMA3}, prompt_length=100),
    "llama-linear": Case("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "llama-dynamic": Case(
        "llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 48}
    ),
    "llama-yarn": Case("llama", {"rope_scaling": YARN}, prompt_length=100),
    "qwen2-yarn": Case("qwen2", {"rope_scaling": YARN | {"beta_fast": 16, "attention_factor": 1.3}}, prompt_length=100),
    "mistral": Case("mistral"),
    "mistral-window": Case("mistral", {"extra_config": {"sliding_window": 20}}, prompt_length=70),
    "mistral-window-of-two": Case("mistral", {"extra_config": {"sliding_window": 2}}),
    "qwen2": Case("qwen2"),
    "qwen2-tied": Case("qwen2", {"tie": True}),
    "qwen2-window": Case(
        "qwen2", {"extra_config": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}}
    ),
    "qwen3": Case("qwen3"),
    "qwen3-tied": Case("qwen3", {"tie": True, "head_dim": 32}),
    "qwen3-bias": Case("qwen3", {"extra_config": {"attention_bias": True}, "head_dim": 48}),
    "qwen2-some-windows": Case("qwen2", SOME_WINDOWS, prompt_length=70),
    "qwen3-listed-windows": Case(
        "qwen3",
        {"extra_config": SWITCHED | {"layer_types": ["sliding_attention", "full_attention"]}, "head_dim": 32},
        prompt_length=70,
    ),
    "ministral": Case(
        "ministral",
        {"extra_config": {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}},
        prompt_length=70,
    ),
    "gemma": Case("gemma", {"tie": True, "head_dim": 24}),
    "gemma2": Case("gemma2", {"tie": True, "head_dim": 24, "num_layers": 3}, prompt_length=70),
    "gemma2-float16": Case("gemma2", {"hidden_size": 96, "heads": 6}, dtype="float16"),
    "gemma3": Case("gemma3", {"tie": True, "head_dim": 24, "num_layers": 3}, prompt_length=70),
    "gemma3-linear": Case(
        "gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "num_layers": 3}, prompt_length=70
    ),
    "gemma3-softcap": Case("gemma3", {"extra_config": {"final_logit_softcapping": 5.0, "attention_bias": True}}),
    "phi3": Case("phi3", {"head_dim": 16}),
    "phi3-window": Case("phi3", {"head_dim": 16, "extra_config": {"sliding_window": 20}}, prompt_length=70),
    "phi4-mini": Case("phi3", phi4_mini(256)),
    "phi4-mini-long": Case("phi3", phi4_mini(128), prompt_length=150),
    "gemma3-bfloat16": Case("gemma3", {"tie": True}, dtype="bfloat16"),
    "phi3-float16": Case("phi3", dtype="float16"),
    "mixtral": Case("mixtral"),
    "mixtral-tied": Case("mixtral", {"tie": True, "extra_config": {"num_local_experts": 5, "sliding_window": 20}}),
    "mixtral-one-expert": Case("mixtral", {"extra_config": {"num_experts_per_tok": 1}}),
    "qwen3-moe": Case("qwen3_moe"),
    "qwen3-moe-tied": Case("qwen3_moe", {"tie": True, "head_dim": 24, "extra_config": {"norm_topk_prob": False}}),
    "qwen3-moe-odd": Case("qwen3_moe", {"extra_config": {"num_experts": 5, "moe_intermediate_size": 36}}),
    "gpt-oss": Case("gpt_oss", {"head_dim": 24}, prompt_length=70),
    "gpt-oss-tied": Case(
        "gpt_oss",
        {
            "tie": True,
            "extra_config": {"num_local_experts": 5, "swiglu_limit": 7.0, "layer_types": ["full_attention"] * 2},
        },
    ),
    "gpt-oss-all-experts": Case("gpt_oss", {"extra_config": {"num_experts_per_tok": 4, "sliding_window": 8}}),
    "gpt-oss-bfloat16": Case("gpt_oss", {"num_layers": 3}, dtype="bfloat16", prompt_length=70),
    "mixtral-bfloat16": Case("mixtral", dtype="bfloat16"),
    "qwen3-moe-bfloat16": Case("qwen3_moe", dtype="bfloat16"),
    "llama-bfloat16": Case("llama", dtype="bfloat16"),
    "llama-float16": Case("llama", {"tie": True}, dtype="float16"),
    "qwen2-bfloat16": Case("qwen2", dtype="bfloat16"),
    "qwen3-float16": Case("qwen3", dtype="float16"),
}


def load_reference(checkpoint: Path, dtype: str) -> Any:
    """The model in float32, its weights rounded to ``dtype``, and what scales Gemma's embedding, as the class does."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        scales = [buffer for name, buffer in model.named_buffers() if name.endswith("embed_scale")]
        for parameter in (*model.parameters(), *scales):
            parameter.copy_(parameter.to(getattr(torch, dtype)))
    return model.eval()


def run_reference(model: Any, prompt: list[int], token_by_token: bool) -> tuple[NDArray[np.float32], list[int]]:
    """Logits of the prompt, fed at once or token by token, and of greedy decoding behind it; the ids decoded."""
    # transformers 5.24 renamed the argument
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {argument: transformers.DynamicCache(config=model.config)}
    pending = [[token] for token in prompt] if token_by_token else [prompt]
    ids: list[int] = []
    logits: list[NDArray[np.float32]] = []
    while len(ids) < NUM_GENERATED:
        with torch.no_grad():
            logits.append(model(torch.tensor([pending.pop(0)]), use_cache=True, **cache).logits[0].numpy())
        if not pending:
            ids.append(int(logits[-1][-1].argmax()))
            pending.append(ids[-1:])
    return np.concatenate(logits), ids


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads than one only make tiny products slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_ids_equal_those_of_transformers(tmp_path: Path, kernels: Kernels, name: str) -> None:
    case = CASES[name]
    options = {**case.options, "extra_config": {"eos_token_id": 0, **case.options.get("extra_config", {})}}
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", case.architecture, **options)
    model = load_reference(checkpoint, case.dtype)
    prompt = np.random.default_rng(1).integers(3, 260, case.prompt_length).tolist()
    is_dynamic = (case.options.get("rope_scaling") or {}).get("rope_type") == "dynamic"
    # The angles of dynamic scaling depend on how a prompt is fed; ours are those of decoding token by token.
    expected, expected_ids = run_reference(model, prompt, token_by_token=is_dynamic)
    engine = build_tiny_engine(tmp_path, checkpoint, dtype=case.dtype, kernels=kernels)
    session = open_tiny_session(engine)
    logits = run_text(session, Text(list(range(40, 56))), [*prompt, *expected_ids[:-1]], None)
    session.close()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)
    if 0 in expected_ids:
        expected_ids = expected_ids[: expected_ids.index(0)]
    assert len(expected_ids) > 8, "the test generates enough"
    with load_engine(engine) as loaded:
        assert list(loaded.generate([prompt], max_tokens=NUM_GENERATED)[0].token_ids) == expected_ids


def test_sinks_are_those_of_gpt_oss(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's network with its attention: each layer and head has a sink of its own."""
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", "llama", heads=8, head_dim=24)
    engine = build_tiny_engine(tmp_path, checkpoint, kernels=kernels, sinks=True)
    model = load_reference(checkpoint, "float32")
    attention = transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward
    monkeypatch.setattr(transformers.models.llama.modeling_llama, "eager_attention_forward", attention)
    weights = load_file(tmp_path / "converted-float32" / WEIGHTS_FILE)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.sinks = torch.from_numpy(weights[f"transformer.layers.{index}.attention.sinks"])
    prompt = np.random.default_rng(1).integers(3, 260, 150).tolist()
    expected, expected_ids = run_reference(model, prompt, token_by_token=False)
    session = open_tiny_session(engine)
    logits = run_text(session, Text(list(range(40, 56))), [*prompt, *expected_ids[:-1]], None)
    session.close()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)

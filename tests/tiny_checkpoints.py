"""Tiny random Hugging Face checkpoints, written with numpy and tokenizers alone (no torch, no transformers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors

Architecture = Literal[
    "llama",
    "mistral",
    "ministral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
]
CLASS_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
MODEL_TYPES = {"gemma3": "gemma3_text"}  # where it is not the architecture's name here
WINDOW = 24
# What the configurations of an architecture say beside those of all.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "gemma": {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 1000.0,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "use_sliding_window": False,
    },
    "gpt_oss": {
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "swiglu_limit": 1.0,
    },
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": 512, "sliding_window": None},
}
# Where rope_scaling is none: its class would scale as the published model does, by a factor of 32.
GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he"), ("i", "n"), ("a", "n"))
NUM_TOKENS = len(SPECIAL_TOKENS) + 256 + len(MERGES)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_checkpoint(
    directory: Path,
    architecture: Architecture = "llama",
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tie: bool = False,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    dtype: str = "float32",
    seed: int = 0,
    shards: int = 1,
    max_position_embeddings: int = 512,
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint with a byte-level tokenizer and a ChatML template; return ``directory``.

    ``extra_config`` is merged into ``config.json`` last; ``attention_bias`` and ``mlp_bias`` in it add the bias
    tensors. The tokenizer has ``NUM_TOKENS`` ids, ``<|im_end|>`` (2) ends a text.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if architecture == "gpt_oss" and rope_scaling is None:
        rope_scaling = GPT_OSS_SCALING
    size_of_head = head_dim or (128 if architecture == "qwen3" else hidden_size // heads)
    config: dict[str, Any] = {
        "architectures": [CLASS_NAMES[architecture]],
        "model_type": MODEL_TYPES.get(architecture, architecture),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size_of_head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    config |= OWN_KEYS.get(architecture, {}) | (extra_config or {})
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    tensors = random_tensors(config, seed)
    stored = {name: values.astype(numpy_dtype(dtype)) for name, values in tensors.items()}
    write_weights(directory, stored, dtype, shards)
    write_tiny_tokenizer(directory)
    return directory


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Return the tensors a ``config.json`` asks for, float32, under Hugging Face's names.

    Matrices are scaled so that activations keep their size and logits have a spread of about 2: greedy choices of a
    random model are then clear ones.
    """
    generator = np.random.default_rng(seed)
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    model_type = config["model_type"]
    is_qwen2, is_gemma, is_phi3 = model_type == "qwen2", model_type.startswith("gemma"), model_type == "phi3"
    qkv_bias, dense_bias = is_qwen2 or config.get("attention_bias"), config.get("attention_bias") and not is_qwen2
    tensors: dict[str, NDArray[np.float32]] = {}

    def add_linear(name: str, rows: int, columns: int, bias: object) -> None:
        tensors[f"{name}.weight"] = (generator.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        if bias:
            tensors[f"{name}.bias"] = (generator.standard_normal(rows) * 0.1).astype(np.float32)

    def add_norm(name: str, size: int) -> None:
        mean = 0.0 if is_gemma else 1.0  # its norms multiply by 1 + weight
        tensors[f"{name}.weight"] = (mean + 0.1 * generator.standard_normal(size)).astype(np.float32)

    def add_experts(prefix: str, count: int, size: int, names: tuple[str, str, str]) -> None:
        add_linear(f"{prefix}.gate", count, hidden, False)
        for expert in range(count):
            for name, rows, columns in zip(names, (size, size, hidden), (hidden, hidden, size), strict=True):
                add_linear(f"{prefix}.experts.{expert}.{name}", rows, columns, False)

    def add_stacked_experts(prefix: str, count: int) -> None:
        add_linear(f"{prefix}.router", count, hidden, True)
        for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            matrices = generator.standard_normal((count, columns, rows)) / columns**0.5
            tensors[f"{prefix}.experts.{name}"] = matrices.astype(np.float32)
            biases = generator.standard_normal((count, rows)) * 0.1
            tensors[f"{prefix}.experts.{name}_bias"] = biases.astype(np.float32)

    embedding_scale = 2.0 / hidden**0.5 if config["tie_word_embeddings"] else 1.0
    embedding = generator.standard_normal((config["vocab_size"], hidden)) * embedding_scale
    tensors["model.embed_tokens.weight"] = embedding.astype(np.float32)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        if is_phi3:
            add_linear(f"{prefix}.self_attn.qkv_proj", q_rows + 2 * kv_rows, hidden, False)
        else:
            add_linear(f"{prefix}.self_attn.q_proj", q_rows, hidden, qkv_bias)
            add_linear(f"{prefix}.self_attn.k_proj", kv_rows, hidden, qkv_bias)
            add_linear(f"{prefix}.self_attn.v_proj", kv_rows, hidden, qkv_bias)
        add_linear(f"{prefix}.self_attn.o_proj", hidden, q_rows, dense_bias)
        if model_type == "gpt_oss":
            tensors[f"{prefix}.self_attn.sinks"] = generator.standard_normal(q_rows // head).astype(np.float32)
        if model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
            add_norm(f"{prefix}.self_attn.q_norm", head)
            add_norm(f"{prefix}.self_attn.k_norm", head)
        if model_type == "mixtral":
            add_experts(f"{prefix}.block_sparse_moe", config["num_local_experts"], ffn, ("w1", "w3", "w2"))
        elif model_type == "gpt_oss":
            add_stacked_experts(f"{prefix}.mlp", config["num_local_experts"])
        elif model_type == "qwen3_moe":
            names = "gate_proj", "up_proj", "down_proj"
            add_experts(f"{prefix}.mlp", config["num_experts"], config["moe_intermediate_size"], names)
        else:
            if is_phi3:
                add_linear(f"{prefix}.mlp.gate_up_proj", 2 * ffn, hidden, False)
            else:
                add_linear(f"{prefix}.mlp.gate_proj", ffn, hidden, config.get("mlp_bias"))
                add_linear(f"{prefix}.mlp.up_proj", ffn, hidden, config.get("mlp_bias"))
            add_linear(f"{prefix}.mlp.down_proj", hidden, ffn, config.get("mlp_bias"))
        add_norm(f"{prefix}.input_layernorm", hidden)
        add_norm(f"{prefix}.post_attention_layernorm", hidden)
        if model_type in ("gemma2", "gemma3_text"):
            add_norm(f"{prefix}.pre_feedforward_layernorm", hidden)
            add_norm(f"{prefix}.post_feedforward_layernorm", hidden)
    add_norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        add_linear("lm_head", config["vocab_size"], hidden, False)
        tensors["lm_head.weight"] *= 2.0
    return tensors


def write_weights(directory: Path, tensors: dict[str, NDArray[Any]], dtype: str, shards: int = 1) -> None:
    """Write ``model.safetensors``, or ``shards`` files with their index."""
    names = list(tensors)
    if shards == 1:
        write_safetensors(directory / "model.safetensors", _entries(tensors, names, dtype), {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        write_safetensors(directory / file_name, _entries(tensors, members, dtype), {"format": "pt"})
        weight_map |= dict.fromkeys(members, file_name)
    total_bytes = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _entries(tensors: dict[str, NDArray[Any]], names: list[str], dtype: str) -> list[TensorEntry]:
    def entry(name: str) -> TensorEntry:
        return TensorEntry(name, dtype, tensors[name].shape, lambda: [tensors[name].tobytes()])

    return [entry(name) for name in names]


def write_tiny_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of ``NUM_TOKENS`` ids: special tokens, 256 bytes, a few merges."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHATML_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))

"""Tiny random draft checkpoints in the layouts of the reference implementations, written with numpy alone.

Each fits a tiny target of ``tests/tiny_checkpoints.py``, whose folder is read for the sizes. A draft model needs no
writer of its own: ``write_tiny_checkpoint`` writes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors

Tensors = dict[str, NDArray[Any]]


def write_tiny_eagle1(
    directory: Path,
    target_dir: Path,
    *,
    seed: int = 0,
    bias: bool = True,
    qkv_bias: bool = False,
    own_embedding: bool = True,
    num_layers: int = 1,
    max_position_embeddings: int = 512,
    dtype: str = "float32",
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write an EAGLE-1/2 head: ``model.safetensors`` and ``config.json``; return ``directory``.

    ``bias`` is the one of ``fc``. As in published heads, ``config.json`` says nothing of a bias that is there.
    """
    config = _head_config(target_dir, num_layers, max_position_embeddings)
    if not bias:
        config["bias"] = False
    if qkv_bias:
        config["qkv_bias"] = True
    config |= extra_config or {}
    weights = _Weights(seed)
    hidden = config["hidden_size"]
    if own_embedding:
        weights.tensors["embed_tokens.weight"] = weights.normal(config["vocab_size"], hidden)
    weights.add_linear("fc", hidden, 2 * hidden, bias)
    for layer in range(num_layers):
        if layer > 0:
            weights.add_norm(f"layers.{layer}.input_layernorm", hidden)
        weights.add_layer(f"layers.{layer}", config, hidden, qkv_bias)
    write_draft(directory, weights.tensors, config, dtype)
    return directory


def write_tiny_eagle3(
    directory: Path,
    target_dir: Path,
    *,
    draft_vocab_size: int | None = 200,
    captured_layers: tuple[int, ...] | None = (0, 1),
    num_captured_layers: int = 3,
    seed: int = 0,
    qkv_bias: bool = False,
    own_embedding: bool = False,
    own_lm_head: bool = True,
    hidden_size: int | None = None,
    max_position_embeddings: int = 512,
    dtype: str = "float32",
    extra_config: dict[str, Any] | None = None,
) -> Path:
    """Write an EAGLE-3 head as the reference and SpecForge do; return ``directory``.

    ``draft_vocab_size`` None: the whole vocabulary of the target, without ``d2t`` and ``t2d``. ``captured_layers``
    (outputs of these target layers, 0-based) go to ``eagle_config``; None: left out, ``num_captured_layers`` features.
    ``hidden_size`` None: the target's; another one needs ``own_embedding`` and ``own_lm_head``.
    """
    config = _head_config(target_dir, 1, max_position_embeddings)
    target_hidden, vocab = config["hidden_size"], config["vocab_size"]
    hidden = hidden_size or target_hidden
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": hidden, "target_hidden_size": target_hidden}
    config["draft_vocab_size"] = draft_vocab_size or vocab
    if qkv_bias:
        config["qkv_bias"] = True
    if captured_layers is not None:
        num_captured_layers = len(captured_layers)
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(captured_layers),
            "use_aux_hidden_state": True,
        }
    config |= extra_config or {}
    weights = _Weights(seed)
    if own_embedding:
        weights.tensors["embed_tokens.weight"] = weights.normal(vocab, hidden)
    weights.add_linear("fc", hidden, num_captured_layers * target_hidden, False)
    weights.add_norm("midlayer.hidden_norm", hidden)
    weights.add_norm("midlayer.input_layernorm", hidden)
    weights.add_layer("midlayer", config, 2 * hidden, qkv_bias)
    weights.add_norm("norm", hidden)
    if own_lm_head:
        weights.add_linear("lm_head", draft_vocab_size or vocab, hidden, False)
        weights.tensors["lm_head.weight"] *= 2.0
    if draft_vocab_size is not None:
        target_ids = np.sort(weights.generator.permutation(vocab)[:draft_vocab_size])
        weights.tensors["d2t"] = target_ids - np.arange(draft_vocab_size)
        weights.tensors["t2d"] = np.isin(np.arange(vocab), target_ids)
    write_draft(directory, weights.tensors, config, dtype)
    return directory


def write_tiny_medusa(
    directory: Path,
    target_dir: Path,
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    seed: int = 0,
    own_lm_head: bool = True,
    dtype: str = "float32",
) -> Path:
    """Write Medusa v1 heads: ``medusa_lm_head.safetensors`` and ``config.json``; return ``directory``.

    ``config.json`` names two heads whatever ``num_heads`` is, as the published ones do.
    """
    target = json.loads((target_dir / "config.json").read_text())
    hidden = target["hidden_size"]
    weights = _Weights(seed)
    for head in range(num_heads):
        for layer in range(num_layers):
            weights.add_linear(f"{head}.{layer}.linear", hidden, hidden, True)
        if own_lm_head:
            weights.add_linear(f"{head}.{num_layers}", target["vocab_size"], hidden, False)
            weights.tensors[f"{head}.{num_layers}.weight"] *= 2.0
    config = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, "base_model_name_or_path": "tiny"}
    write_draft(directory, weights.tensors, config, dtype, "medusa_lm_head.safetensors")
    return directory


def write_draft(
    directory: Path,
    tensors: Mapping[str, NDArray[Any]],
    config: dict[str, Any] | None,
    dtype: str = "float32",
    weights_file: str = "model.safetensors",
) -> None:
    """Write a draft checkpoint; floating-point tensors get ``dtype``, others keep theirs."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
    stored = {
        name: values.astype(numpy_dtype(dtype)) if values.dtype.kind == "f" else values
        for name, values in tensors.items()
    }
    write_safetensors(directory / weights_file, [_entry(name, values) for name, values in stored.items()])


def _entry(name: str, values: NDArray[Any]) -> TensorEntry:
    return TensorEntry(name, str(values.dtype), values.shape, lambda: [np.ascontiguousarray(values)])


def _head_config(target_dir: Path, num_layers: int, max_position_embeddings: int) -> dict[str, Any]:
    target = json.loads((target_dir / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: target[name] for name in sizes},
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


class _Weights:
    """Random tensors, scaled so that activations keep their size and logits have a spread of about 2."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.tensors: Tensors = {}

    def normal(self, *shape: int) -> NDArray[np.float32]:
        return self.generator.standard_normal(shape).astype(np.float32)

    def add_linear(self, name: str, rows: int, columns: int, bias: bool) -> None:
        self.tensors[f"{name}.weight"] = self.normal(rows, columns) / np.float32(columns**0.5)
        if bias:
            self.tensors[f"{name}.bias"] = self.normal(rows) * np.float32(0.1)

    def add_norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = 1 + np.float32(0.1) * self.normal(size)

    def add_layer(self, prefix: str, config: dict[str, Any], attention_size: int, qkv_bias: bool) -> None:
        """Add the tensors that every layer has; ``attention_size`` is the width of what attention reads."""
        hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        self.add_linear(f"{prefix}.self_attn.q_proj", q_rows, attention_size, qkv_bias)
        self.add_linear(f"{prefix}.self_attn.k_proj", kv_rows, attention_size, qkv_bias)
        self.add_linear(f"{prefix}.self_attn.v_proj", kv_rows, attention_size, qkv_bias)
        self.add_linear(f"{prefix}.self_attn.o_proj", hidden, q_rows, False)
        self.add_linear(f"{prefix}.mlp.gate_proj", ffn, hidden, False)
        self.add_linear(f"{prefix}.mlp.up_proj", ffn, hidden, False)
        self.add_linear(f"{prefix}.mlp.down_proj", hidden, ffn, False)
        self.add_norm(f"{prefix}.post_attention_layernorm", hidden)

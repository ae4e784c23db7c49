"""Tiny targets that say much the same as their drafts, so that runs of every length are accepted and refused.

The layers of these targets only murmur: the last token decides nearly alone which one is likely next. So a head that
knows the target's embedding and ``lm_head`` guesses well, without any training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.tiny_checkpoints import NUM_TOKENS, Architecture, write_tiny_checkpoint, write_weights
from tests.tiny_drafts import write_draft, write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

Tensors = dict[str, NDArray[Any]]
_WHAT_LAYERS_ADD = ("o_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj", "down_proj_bias")
_WHAT_GEMMA_ADDS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")  # 1 + these


def write_murmuring_target(
    directory: Path, architecture: Architecture = "llama", *, loudness: float = 0.5, **sizes: Any
) -> Path:
    """Write a random target whose layers add ``loudness`` times what those of ``write_tiny_checkpoint`` add."""
    write_tiny_checkpoint(directory, architecture, **sizes)
    if sizes.get("vocab_size", NUM_TOKENS) < NUM_TOKENS:
        _cut_tokenizer(directory / "tokenizer.json", sizes["vocab_size"])
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(_WHAT_LAYERS_ADD):
            tensors[name] = tensors[name] * np.float32(loudness)
        elif architecture == "gemma3" and name.endswith(_WHAT_GEMMA_ADDS):
            tensors[name] = np.float32(loudness) * (1 + tensors[name]) - 1
    write_weights(directory, tensors, "float32")
    return directory


def write_perturbed(directory: Path, target: Path, *, noise: float, **config: Any) -> Path:
    """Write a draft model: ``target`` with noise of ``noise`` times their own spread on all its matrices."""
    shutil.copytree(target, directory)
    (directory / "config.json").write_text(json.dumps(json.loads((target / "config.json").read_text()) | config))
    generator = np.random.default_rng(1)
    tensors = load_file(target / "model.safetensors")
    for name, values in tensors.items():
        if values.ndim == 2:
            spread = np.float32(noise * values.std())
            tensors[name] = values + generator.standard_normal(values.shape).astype(np.float32) * spread
    write_weights(directory, tensors, "float32")
    return directory


def write_likely_eagle1(directory: Path, target: Path, *, loudness: float = 0.3, **options: Any) -> Path:
    """Write a head whose ``fc`` passes the new token's embedding on as the target's last norm weighs it."""
    write_tiny_eagle1(directory, target, bias=False, own_embedding=False, **options)
    tensors, norm = load_file(directory / "model.safetensors"), target_norm(target)
    tensors["fc.weight"] = np.concatenate([np.diag(norm), np.float32(0.02) * tensors["fc.weight"][:, norm.size :]], 1)
    for name in tensors:
        if name.endswith(_WHAT_LAYERS_ADD):
            tensors[name] = tensors[name] * np.float32(loudness)
    _rewrite(directory, tensors)
    return directory


def write_likely_eagle3(directory: Path, target: Path, *, draft_vocab_size: int | None = 250, **options: Any) -> Path:
    """Write a head that attends to its own row, takes the new token's embedding from there, and reads it as the
    target does."""
    num_heads = json.loads((target / "config.json").read_text())["num_attention_heads"]
    all_heads = {"num_key_value_heads": num_heads}
    write_tiny_eagle3(directory, target, draft_vocab_size=draft_vocab_size, extra_config=all_heads, **options)
    config = json.loads((directory / "config.json").read_text())
    hidden, size = config["hidden_size"], num_heads * config["head_dim"]
    tensors, norm = load_file(directory / "model.safetensors"), target_norm(target)
    embedding = np.eye(size, 2 * hidden, dtype=np.float32)  # attention reads the token, then what the head said before
    said_before = np.eye(size, 2 * hidden, hidden, dtype=np.float32)
    tensors["midlayer.self_attn.q_proj.weight"] = 5 * embedding
    tensors["midlayer.self_attn.k_proj.weight"] = embedding
    tensors["midlayer.self_attn.v_proj.weight"] = embedding - np.float32(0.5) * said_before
    tensors["midlayer.self_attn.o_proj.weight"] = 4 * np.eye(hidden, size, dtype=np.float32)
    tensors["midlayer.mlp.down_proj.weight"] *= np.float32(0.2)
    tensors["fc.weight"] *= np.float32(0.2)
    tensors["midlayer.input_layernorm.weight"][:] = 1
    tensors["norm.weight"] = norm
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    if "d2t" in tensors:
        lm_head = lm_head[tensors["d2t"] + np.arange(tensors["d2t"].size)]
    tensors["lm_head.weight"] = lm_head
    _rewrite(directory, tensors)
    return directory


def write_likely_medusa(directory: Path, target: Path, *, num_heads: int = 4) -> Path:
    """Write heads fitted by least squares to what the target's murmurless self says 2, 3, ... tokens later."""
    write_tiny_medusa(directory, target, num_heads=num_heads)
    tensors = load_file(directory / "medusa_lm_head.safetensors")
    of_target = load_file(target / "model.safetensors")
    embedding = of_target["model.embed_tokens.weight"].astype(np.float64)
    rows = embedding / np.sqrt((embedding**2).mean(1, keepdims=True)) * target_norm(target)
    following = (rows @ of_target["lm_head.weight"].T).argmax(1)
    # Tokens that are often said count more.
    visits = np.ones(len(rows))
    place = np.arange(len(rows))
    for _ in range(30):
        place = following[place]
        np.add.at(visits, place, 1.0)
    weights = np.minimum(visits, 50.0)[:, None] ** 0.5
    later = following
    for head in range(num_heads):
        later = following[later]
        wanted = np.eye(len(rows))[later]
        fitted = np.linalg.lstsq(weights * rows, weights * wanted, rcond=None)[0]
        tensors[f"{head}.0.linear.weight"] *= np.float32(0.01)
        tensors[f"{head}.0.linear.bias"] *= np.float32(0.01)
        tensors[f"{head}.1.weight"] = (8 * fitted.T).astype(np.float32)
    _rewrite(directory, tensors, "medusa_lm_head.safetensors")
    return directory


def target_norm(target: Path) -> NDArray[np.float32]:
    """What the target's last norm multiplies by."""
    norm: NDArray[np.float32] = load_file(target / "model.safetensors")["model.norm.weight"]
    is_gemma = json.loads((target / "config.json").read_text())["model_type"].startswith("gemma")
    return norm + 1 if is_gemma else norm


def _cut_tokenizer(path: Path, vocab_size: int) -> None:
    """Keep the first ``vocab_size`` tokens: the special ones and some bytes."""
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < vocab_size}
    model["merges"] = []
    path.write_text(json.dumps(tokenizer))


def _rewrite(directory: Path, tensors: Tensors, weights_file: str = "model.safetensors") -> None:
    config = json.loads((directory / "config.json").read_text())
    write_draft(directory, tensors, config, "float32", weights_file)

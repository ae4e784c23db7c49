"""What TensorRT-LLM's converters make of arrays, written from their documentation with whole arrays in memory.

Independent of ``draftline.checkpoints.ranks``: no table and no band is shared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]


def chunk(values: NDArray[Any], tp_size: int, place: int, axis: int = 0) -> NDArray[Any]:
    return np.split(values, tp_size, axis)[place]


def padded_chunk(values: NDArray[Any], tp_size: int, place: int) -> NDArray[Any]:
    rows = -(-len(values) // tp_size) * tp_size
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return chunk(padded, tp_size, place)


def repeated(values: NDArray[Any], kv_heads: int, tp_size: int) -> NDArray[Any]:
    if kv_heads >= tp_size:
        return values
    by_head = values.reshape(kv_heads, -1, *values.shape[1:])
    return np.repeat(by_head, tp_size // kv_heads, 0).reshape(-1, *values.shape[1:])


def layer_of_rank(source: Arrays, prefix: str, key: str, kv_heads: int, tp_size: int, place: int) -> Arrays:
    """Return a layer's tensors: those under ``prefix`` of a Hugging Face checkpoint, under ``key``."""
    found: Arrays = {}
    for kind in ("weight", "bias"):
        if f"{prefix}self_attn.q_proj.{kind}" in source:
            q, k, v = (source[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv")
            k, v = repeated(k, kv_heads, tp_size), repeated(v, kv_heads, tp_size)
            found[f"{key}attention.qkv.{kind}"] = np.concatenate([chunk(part, tp_size, place) for part in (q, k, v)])
        for ours, theirs in (("fc", "gate_proj"), ("gate", "up_proj")):
            if f"{prefix}mlp.{theirs}.{kind}" in source:
                found[f"{key}mlp.{ours}.{kind}"] = chunk(source[f"{prefix}mlp.{theirs}.{kind}"], tp_size, place)
    for ours, theirs in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
        found[f"{key}{ours}.weight"] = chunk(source[f"{prefix}{theirs}.weight"], tp_size, place, 1)
        if f"{prefix}{theirs}.bias" in source:
            found[f"{key}{ours}.bias"] = source[f"{prefix}{theirs}.bias"]
    norms = {
        "input_layernorm": "input_layernorm",
        "post_layernorm": "post_attention_layernorm",
        "attention.q_layernorm": "self_attn.q_norm",
        "attention.k_layernorm": "self_attn.k_norm",
    }
    for ours, theirs in norms.items():
        if f"{prefix}{theirs}.weight" in source:
            found[f"{key}{ours}.weight"] = source[f"{prefix}{theirs}.weight"]
    return found


def target_of_rank(
    source: Arrays, num_layers: int, kv_heads: int, tp_size: int = 1, pp_size: int = 1, rank: int = 0
) -> Arrays:
    stage, place = divmod(rank, tp_size)
    found: Arrays = {}
    if stage == 0:
        found["transformer.vocab_embedding.weight"] = source["model.embed_tokens.weight"]
    layers = np.array_split(np.arange(num_layers), pp_size)[stage].tolist()
    for local, layer in enumerate(layers):
        key = f"transformer.layers.{local}."
        found |= layer_of_rank(source, f"model.layers.{layer}.", key, kv_heads, tp_size, place)
    if stage == pp_size - 1:
        found["transformer.ln_f.weight"] = source["model.norm.weight"]
        head = source.get("lm_head.weight", source["model.embed_tokens.weight"])
        found["lm_head.weight"] = padded_chunk(head, tp_size, place)
    return found


def medusa_of_rank(
    heads: Arrays, num_heads: int, num_layers: int, lm_head: NDArray[Any], tp_size: int, place: int
) -> Arrays:
    found: Arrays = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            for kind in ("weight", "bias"):
                key = f"medusa_heads.{head}.medusa_layers.{layer}.linear.{kind}"
                found[key] = chunk(heads[f"{head}.{layer}.linear.{kind}"], tp_size, place)
        projection = heads.get(f"{head}.{num_layers}.weight", lm_head)
        found[f"medusa_heads.{head}.lm_head.weight"] = padded_chunk(projection, tp_size, place)
    return found


def eagle_of_rank(
    head: Arrays, target: Arrays, kv_heads: int, depth: int, tp_size: int, place: int, lm_head: NDArray[Any]
) -> Arrays:
    hidden = head["fc.weight"].shape[0]
    bias = head.get("fc.bias", np.zeros(hidden, head["fc.weight"].dtype))
    embedding = head.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    found: Arrays = {}
    for copy in range(depth):
        found[f"eagle_nets.{copy}.drafter.fc.weight"] = chunk(head["fc.weight"], tp_size, place)
        found[f"eagle_nets.{copy}.drafter.fc.bias"] = chunk(bias, tp_size, place)
        found[f"eagle_nets.{copy}.lm_head.weight"] = padded_chunk(lm_head, tp_size, place)
        found[f"eagle_nets.{copy}.drafter.vocab_embedding.weight"] = embedding
        key = f"eagle_nets.{copy}.drafter.layers.0."
        found |= layer_of_rank(head, "layers.0.", key, kv_heads, tp_size, place)
    return found

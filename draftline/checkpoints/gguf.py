"""Read a GGUF file with the ``gguf`` package alone: configuration and tensors, dequantised a few rows at a time.

Source: llama.cpp's ``convert_hf_to_gguf.py`` and its table of names. For the architecture ``llama`` it reorders the
rows of q and k within each head, from the halves (i, i + d/2) of Hugging Face's rotary embedding to neighbours
(2i, 2i + 1); reading undoes that. Qwen's rows are not reordered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.gguf_tokenizer import write_gguf_tokenizer
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.optional_package import import_optional
from draftline.checkpoints.safetensors_file import CHUNK_BYTES
from draftline.checkpoints.source_tensor import SourceCheckpoint, SourceTensor
from draftline.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}

# Metadata key after the architecture's prefix -> key of Hugging Face's config.json.
CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
# Of architectures with experts, beside CONFIG_KEYS. No key says so, but llama.cpp renormalises weights of the chosen.
EXPERT_KEYS = {
    "qwen3moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }
}
ROPE_SCALING_KEYS = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
# Read elsewhere or without an effect on the network.
OTHER_KEYS = {"attention.value_length", "rope.dimension_count", "rope.scaling.finetuned"}

# GGUF name -> Hugging Face name, for weights and biases alike.
TENSOR_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# One tensor of all experts -> the name of each.
EXPERT_TENSOR_NAMES = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_PERMUTED = {"llama": ("attn_q", "attn_k")}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.(?P<kind>weight|bias)")

_USE_HUGGING_FACE = "use the Hugging Face checkpoint of the same model"


def open_gguf(path: Path, dtype: str) -> SourceCheckpoint:
    """Open a GGUF file; its metadata is read and checked, its tensors are not.

    Raises:
        CheckpointError: the file is damaged, or its architecture, quantisation or tokenizer is not supported.
        MissingPackageError: the package ``gguf`` is not installed.
    """
    gguf = import_optional("gguf", "a .gguf checkpoint", "pip install 'draftline[gguf]'")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(path, "the file is a whole GGUF file", str(error), "fetch the file again") from error
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        rule = f"general.architecture is one of {', '.join(ARCHITECTURES)}"
        raise CheckpointError(path, rule, architecture, "choose a supported model")
    _check_quantisation(path, reader, gguf)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    raw = _huggingface_config(path, architecture, metadata, by_name)
    config = parse_huggingface_config(JsonObject(path, raw), None, dtype)
    num_tokens = len(metadata.get("tokenizer.ggml.tokens") or ())
    if num_tokens > config.vocab_size:
        rule = f"token ids are below vocab_size {config.vocab_size}"
        raise CheckpointError(path, rule, f"{num_tokens} tokens", "fetch the file again")
    tensors = {
        name: source
        for tensor in reader.tensors
        for name, source in _source_tensors(path, tensor, architecture, config.head_size)
    }
    return SourceCheckpoint(path, config, tensors, partial(write_gguf_tokenizer, path, metadata))


def _check_quantisation(path: Path, reader: Any, gguf: Any) -> None:
    file_bytes = path.stat().st_size
    for tensor in reader.tensors:
        end = int(tensor.data_offset + tensor.n_bytes)
        if end > file_bytes:
            rule = f"the file holds tensor {tensor.name} up to byte {end}"
            raise CheckpointError(path, rule, f"{file_bytes} bytes", "fetch the file again")
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            rule = "the gguf package can dequantise the tensors"
            raise CheckpointError(path, rule, kind.name, _USE_HUGGING_FACE) from error


def _huggingface_config(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    prefix = f"{architecture}."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    keys = CONFIG_KEYS | EXPERT_KEYS.get(architecture, {})
    unknown = sorted(set(given) - set(keys) - set(ROPE_SCALING_KEYS) - OTHER_KEYS)
    if unknown:
        got = ", ".join(prefix + key for key in unknown)
        raise CheckpointError(path, "the metadata describes a plain network", got, _USE_HUGGING_FACE)
    raw = {keys[key]: _shortest(value) for key, value in given.items() if key in keys}
    scaling = {ROPE_SCALING_KEYS[key]: _shortest(value) for key, value in given.items() if key in ROPE_SCALING_KEYS}
    if scaling.get("rope_type", "none") != "none":
        raw["rope_scaling"] = scaling
    end_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    embedding = tensors.get("token_embd.weight")
    defaults = {
        "vocab_size": None if embedding is None else int(embedding.shape[1]),
        "head_dim": given.get("rope.dimension_count"),
    }
    return (
        {name: value for name, value in defaults.items() if value is not None}
        | raw
        | {
            "architectures": [ARCHITECTURES[architecture]],
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "sliding_window": None,
            "norm_topk_prob": True,
            "eos_token_id": [token_id for token_id in dict.fromkeys(end_ids) if token_id is not None],
        }
    )


def _shortest(value: Any) -> Any:
    """Undo the widening of float32 metadata: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _source_tensors(path: Path, tensor: Any, architecture: str, head_size: int) -> Iterator[tuple[str, SourceTensor]]:
    match = _TENSOR_NAME.fullmatch(tensor.name)
    layer = match and match["layer"]
    names = TENSOR_NAMES if layer is None else LAYER_TENSOR_NAMES | EXPERT_TENSOR_NAMES
    if match is None or match["stem"] not in names:
        rule = f"the tensors of {architecture} have known names"
        raise CheckpointError(path, rule, tensor.name, _USE_HUGGING_FACE)
    name = names[match["stem"]] if layer is None else f"model.layers.{layer}.{names[match['stem']]}"
    group_rows = head_size if match["stem"] in _PERMUTED.get(architecture, ()) else 1
    shape = tuple(int(size) for size in reversed(tensor.shape))
    # Those of all experts lie one behind the other.
    count, shape = (shape[0], shape[1:]) if match["stem"] in EXPERT_TENSOR_NAMES else (1, shape)
    for expert in range(count):
        offset = int(tensor.data_offset) + expert * (int(tensor.n_bytes) // count)
        chunks = partial(_read_chunks, path, offset, shape, tensor.tensor_type, group_rows)
        yield f"{name.format(expert)}.{match['kind']}", SourceTensor(path, "float32", shape, chunks)


def _read_chunks(
    path: Path, byte_offset: int, shape: tuple[int, ...], kind: Any, group_rows: int
) -> Iterator[NDArray[Any]]:
    """Yield float32 rows; the rows of each group of ``group_rows`` (> 1: a head) go back to Hugging Face's order."""
    gguf = import_optional("gguf", "a .gguf checkpoint", "pip install 'draftline[gguf]'")
    # A vector that is reordered is a column of one-element rows; vectors are never quantised in blocks then.
    num_rows, num_columns = (
        (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1) if group_rows > 1 else (1, shape[0])
    )
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    row_bytes = num_columns // block_elements * block_bytes
    order = np.arange(group_rows).reshape(-1, 2).T.reshape(-1) if group_rows > 1 else np.zeros(1, np.int64)
    chunk_rows = max(1, CHUNK_BYTES // (4 * num_columns * group_rows)) * group_rows
    with path.open("rb", buffering=0) as file:
        file.seek(byte_offset)
        for start in range(0, num_rows, chunk_rows):
            data = file.read(min(chunk_rows, num_rows - start) * row_bytes)
            packed = np.frombuffer(data, np.uint8).reshape(-1, row_bytes)
            rows: NDArray[np.float32] = gguf.quants.dequantize(packed, kind)
            yield rows.reshape(-1, group_rows, num_columns)[:, order].reshape(-1)

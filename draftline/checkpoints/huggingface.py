"""Read a Hugging Face directory: configuration, tensors, tokenizer files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.pytorch_file import open_pytorch_file
from draftline.checkpoints.safetensors_file import read_chunks, tensor_locations
from draftline.checkpoints.source_tensor import SourceCheckpoint, SourceTensor
from draftline.checkpoints.tokenizer import TOKENIZER_FILE, check_tokenizer, copy_tokenizer
from draftline.errors import CheckpointError

# Copied to the converted checkpoint where present; only tokenizer.json is required.
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

# In the order in which transformers looks for them.
WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def open_huggingface(directory: Path, dtype: str) -> SourceCheckpoint:
    """Open a Hugging Face directory; headers are read and checked, tensors are not.

    Raises:
        CheckpointError: a file is missing or breaks a rule, or the model is not supported.
    """
    generation_path = directory / "generation_config.json"
    generation = load_json(generation_path) if generation_path.exists() else None
    config = parse_huggingface_config(load_json(directory / "config.json"), generation, dtype)
    check_tokenizer(directory, config.vocab_size)
    return SourceCheckpoint(
        directory, config, open_weights(directory), partial(_copy_tokenizer, directory, config.vocab_size)
    )


def _copy_tokenizer(source: Path, vocab_size: int, destination: Path) -> None:
    copy_tokenizer(source, destination, vocab_size)
    for name in TOKENIZER_FILES[1:]:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def open_weights(directory: Path) -> dict[str, SourceTensor]:
    """Return the tensors of the first of ``WEIGHTS_FILES`` that is there.

    Raises:
        CheckpointError: there is none, or a file is damaged or missing.
    """
    present = [name for name in WEIGHTS_FILES if (directory / name).exists()]
    if not present:
        rule = f"the folder holds one of {', '.join(WEIGHTS_FILES)}"
        raise CheckpointError(directory, rule, "none of them", "fetch the whole checkpoint")
    open_file = open_safetensors if "safetensors" in present[0] else open_pytorch_file
    if present[0].endswith(".index.json"):
        return _open_shards(load_json(directory / present[0]), directory, open_file)
    return open_file(directory / present[0])


def open_safetensors(path: Path) -> dict[str, SourceTensor]:
    """Return the tensors of one safetensors file."""
    return {
        name: SourceTensor(path, location.dtype, location.shape, partial(read_chunks, path, location))
        for name, location in tensor_locations(path).items()
    }


def _open_shards(
    index: JsonObject, directory: Path, open_file: Callable[[Path], dict[str, SourceTensor]]
) -> dict[str, SourceTensor]:
    file_of_tensor = index.get("weight_map")
    if not isinstance(file_of_tensor, dict) or not all(isinstance(name, str) for name in file_of_tensor.values()):
        raise index.error("weight_map", "an object of file names", file_of_tensor)
    tensors: dict[str, SourceTensor] = {}
    for file_name in sorted(set(file_of_tensor.values())):
        # Written paths only: a Hugging Face cache links the named files to blobs elsewhere, and that is fine.
        if Path(file_name).is_absolute() or ".." in Path(file_name).parts:
            raise CheckpointError(index.where, "shards lie inside the checkpoint", file_name, "correct weight_map")
        found = open_file(directory / file_name)
        repeated = sorted(set(found) & set(tensors))
        if repeated:
            got = f"{repeated[0]} again in {file_name}"
            raise CheckpointError(index.where, "a tensor lies in one shard", got, "fetch the checkpoint again")
        tensors |= found
    for name, file_name in file_of_tensor.items():
        if name not in tensors:
            rule = f"{file_name} holds tensor {name}"
            raise CheckpointError(index.where, rule, "a file without it", "fetch the checkpoint again")
    return tensors

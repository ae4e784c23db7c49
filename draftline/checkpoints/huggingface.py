"""Read a Hugging Face directory: configuration, tensors, tokenizer files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.names import weight_map
from draftline.checkpoints.pytorch_file import open_pytorch_file
from draftline.checkpoints.quantized.layout import Quantization, dequantize
from draftline.checkpoints.quantized.recognition import recognise_layout
from draftline.checkpoints.quantized.stated import find_quantization
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


def open_huggingface(directory: Path, dtype: str, *, as_stored: bool = False) -> SourceCheckpoint:
    """Open a Hugging Face directory; headers are read and checked, tensors are not.

    A quantised one is dequantised; with ``as_stored`` its tensors are those that are stored, of whatever layout.

    Raises:
        CheckpointError: a file is missing or breaks a rule, or the model or its quantisation is not supported.
    """
    generation_path = directory / "generation_config.json"
    generation = load_json(generation_path) if generation_path.exists() else None
    raw = load_json(directory / "config.json")
    config = parse_huggingface_config(raw, generation, dtype)
    check_tokenizer(directory, config.vocab_size)
    write_tokenizer = partial(copy_tokenizer_files, directory, config.vocab_size)
    if as_stored:
        return SourceCheckpoint(directory, config, open_weights(directory), write_tokenizer)
    wanted = {name for target in weight_map(config) for name, _ in target.sources}
    tensors, found = open_plain_weights(directory, raw, wanted)
    return SourceCheckpoint(
        directory, config, tensors, write_tokenizer, () if found is None else tuple(found.describe())
    )


def copy_tokenizer_files(source: Path, vocab_size: int, destination: Path) -> None:
    """Copy the tokenizer's files, and those that go with it, from one folder into another."""
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


def open_plain_weights(
    directory: Path, config: JsonObject, wanted: Collection[str]
) -> tuple[dict[str, SourceTensor], Quantization | None]:
    """Return the tensors as ``open_weights`` does, dequantised where ``config`` or a file beside it says so.

    ``wanted``: the tensors that the network has.

    Raises:
        CheckpointError: as ``open_weights``; the layout is not read, or the tensors contradict it.
    """
    stated = find_quantization(directory, config)
    if stated is None:
        return open_weights(directory), None
    layout = recognise_layout(stated)  # refuses by name, before any file is opened
    return dequantize(layout, open_weights(directory), directory, wanted)


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

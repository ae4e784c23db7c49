"""What it takes to divide a checkpoint of an 8B model's shape among ranks, beside copying its files.

``python -m tests.checkpoints.ranks.cost FOLDER [--layers 32] [--ranks 2] [--rounds 3] [--sparse]`` writes a random
bfloat16 checkpoint of Llama-3-8B's shape (16.1 GB with 32 layers) into FOLDER; then, in rounds, copies it, converts it
for one rank and divides it among ``--ranks``, each to disk (fsync included); and prints seconds, ratios and the peak of
resident memory. ``--sparse``: the weights are zeros that take no room on disk until they are copied. What it writes is
removed; it needs twice the checkpoint's room.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.ranks.convert import convert_for_ranks
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.ranks.rank_file import RankFile
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from tests.resident_memory import peak_bytes
from tests.tiny_checkpoints import write_tiny_tokenizer

LAYERS_OF_A_FILE = 8


def write_large_checkpoint(
    folder: Path,
    *,
    layers: int,
    hidden: int = 4096,
    ffn: int = 14336,
    heads: int = 32,
    kv_heads: int = 8,
    vocab: int = 128256,
    sparse: bool = False,
) -> Path:
    """Write shards of random bfloat16 weights; only the bits of their mantissas and signs are random."""
    folder.mkdir()
    head_size = hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(folder)
    kv = kv_heads * head_size
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    files: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocab, hidden)}]
    for first in range(0, layers, LAYERS_OF_A_FILE):
        numbers = range(first, min(first + LAYERS_OF_A_FILE, layers))
        files.append(
            {f"model.layers.{number}.{name}.weight": shape for number in numbers for name, shape in shapes.items()}
        )
    files.append({"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)})
    block = np.random.default_rng(0).integers(0, 1 << 16, 1 << 19, dtype=np.uint16) & 0x807F | 0x3C00
    weight_map = {}
    for index, tensors in enumerate(files):
        name = f"model-{index:05d}.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        if sparse:
            with RankFile(folder / name, "bfloat16", tensors):
                continue
        entries = [TensorEntry(key, "bfloat16", shape, _random(shape, block)) for key, shape in tensors.items()]
        write_safetensors(folder / name, entries)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _random(shape: tuple[int, ...], block: NDArray[np.uint16]) -> Callable[[], Iterator[NDArray[Any]]]:
    def chunks() -> Iterator[NDArray[Any]]:
        left = int(np.prod(shape))
        while left:
            yield block[:left]
            left -= min(left, block.size)

    return chunks


def copy(source: Path, destination: Path) -> None:
    """Copy the files of a folder to disk."""
    destination.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, destination / path.name)
        with (destination / path.name).open("r+b") as file:
            os.fsync(file.fileno())


def seconds_of(write: Callable[[Path], object], destination: Path) -> float:
    """Return the seconds that ``write(destination)`` takes; what it wrote is removed."""
    started = time.perf_counter()
    write(destination)
    seconds = time.perf_counter() - started
    shutil.rmtree(destination)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse", action="store_true")
    arguments = parser.parse_args()
    source = write_large_checkpoint(arguments.folder / "source", layers=arguments.layers, sparse=arguments.sparse)
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    mapping = Mapping(arguments.ranks)
    writers: dict[str, Callable[[Path], object]] = {
        "copied": lambda folder: copy(source, folder),
        "converted": lambda folder: convert_checkpoint(source, folder, "bfloat16", _no_progress),
        f"divided among {arguments.ranks}": lambda folder: convert_for_ranks(
            source, folder, "bfloat16", mapping, None, _no_progress
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(arguments.rounds):
        for name, write in writers.items():
            seconds[name].append(seconds_of(write, arguments.folder / "written"))
    shutil.rmtree(source)
    print(f"{num_bytes / 1e9:.1f} GB, {arguments.rounds} rounds; seconds, and the ratio to the copy of the same round")
    for name, taken in seconds.items():
        ratios = [own / copied for own, copied in zip(taken, seconds["copied"], strict=True)]
        print(f"{name}: {_spread(taken, 1)} s, {_spread(ratios, 2)}")
    print(f"{peak_bytes() / 1e9:.2f} GB resident at most")


def _no_progress(done: int, total: int) -> None:
    pass


def _spread(values: list[float], digits: int) -> str:
    """Return the median with the least and the largest."""
    low, middle, high = (round(value, digits) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} [{low}, {high}]"


if __name__ == "__main__":
    main()

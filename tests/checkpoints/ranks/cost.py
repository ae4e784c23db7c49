"""What it takes to divide a checkpoint of an 8B model's shape among ranks, beside copying its files.

``python -m tests.checkpoints.ranks.cost FOLDER [--layers 32] [--ranks 2] [--sparse]`` writes a random bfloat16
checkpoint of Llama-3-8B's shape (16.1 GB with 32 layers) into FOLDER; copies it, converts it, and copies it again, each
to disk (fsync included); and prints seconds and the peak of resident memory. ``--sparse``: the weights are zeros that
take no room on disk until they are copied. What it writes is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.ranks.convert import convert_for_ranks
from draftline.checkpoints.ranks.mapping import Mapping
from draftline.checkpoints.ranks.rank_file import RankFile
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
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


def measure_copy(source: Path, destination: Path) -> float:
    """Return the seconds that copying takes; the copy is removed."""
    started = time.perf_counter()
    copy(source, destination)
    seconds = time.perf_counter() - started
    shutil.rmtree(destination)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sparse", action="store_true")
    arguments = parser.parse_args()
    source = write_large_checkpoint(arguments.folder / "source", layers=arguments.layers, sparse=arguments.sparse)
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    copied = [measure_copy(source, arguments.folder / "copy")]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    mapping = Mapping(arguments.ranks)
    convert_for_ranks(source, arguments.folder / "ranks", "bfloat16", mapping, None, lambda done, total: None)
    converted = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_SELF)
    shutil.rmtree(arguments.folder / "ranks")
    copied.append(measure_copy(source, arguments.folder / "copy"))
    shutil.rmtree(source)
    seconds = " and ".join(f"{value:.1f}" for value in copied)
    print(
        f"{num_bytes / 1e9:.1f} GB for {arguments.ranks} ranks: copied in {seconds} s, converted in {converted:.1f} s"
    )
    print(f"{converted / min(copied):.2f} times, {usage.ru_utime - before:.1f} s of the processor's own time")
    print(f"{usage.ru_maxrss / 1e6:.2f} GB resident at most")


if __name__ == "__main__":
    main()

"""Converting takes what copying the files takes, whatever their size.

A clock says little on a busy machine, so bytes and memory are counted; ``ranks/cost.py`` measures seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints import huggingface
from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import (
    TensorEntry,
    TensorLocation,
    tensor_locations,
    write_safetensors,
)
from tests.checkpoints.conversion import MEASURE_MEMORY, edit_config, ignore_progress, tensors_of
from tests.tiny_checkpoints import (
    write_tiny_checkpoint,
)


def write_large_checkpoint(directory: Path, layers: int, dtype: str = "float32") -> None:
    """Write a checkpoint of zeros, 12.6 MB per layer in float32."""
    write_tiny_checkpoint(
        directory, hidden_size=512, intermediate_size=1365, num_layers=1, heads=8, kv_heads=8, vocab_size=512
    )
    edit_config(directory, num_hidden_layers=layers)
    shapes = {name: values.shape for name, values in tensors_of(directory).items()}
    entries = [
        TensorEntry(name, dtype, shape, lambda shape=shape: [np.zeros(shape, numpy_dtype(dtype))])  # type: ignore[misc]
        for name, shape in shapes.items()
    ]
    write_safetensors(directory / "model.safetensors", entries)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_byte_is_read_once_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    write_large_checkpoint(tmp_path / "s", layers=2)
    counted = {"read": 0, "written": 0}
    read_chunks, write = huggingface.read_chunks, os.write

    def counting_read(path: Path, location: TensorLocation) -> Iterator[NDArray[Any]]:
        for chunk in read_chunks(path, location):
            counted["read"] += chunk.nbytes
            yield chunk

    def counting_write(descriptor: int, view: memoryview) -> int:
        written = write(descriptor, view)
        counted["written"] += written
        return written

    monkeypatch.setattr(huggingface, "read_chunks", counting_read)
    monkeypatch.setattr(os, "write", counting_write)
    convert_checkpoint(tmp_path / "s", tmp_path / "c", dtype, ignore_progress)
    weights = tensor_locations(tmp_path / "s" / "model.safetensors").values()
    assert counted["read"] == sum(location.num_bytes for location in weights)
    assert counted["written"] == (tmp_path / "c" / "rank0.safetensors").stat().st_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, dtype: str) -> None:
    source, tiny = tmp_path / "s", write_tiny_checkpoint(tmp_path / "tiny")
    write_large_checkpoint(source, layers=16)
    assert (source / "model.safetensors").stat().st_size > 200e6
    largest_bytes = 1365 * 512 * 4
    argv = [sys.executable, "-c", MEASURE_MEMORY, *map(str, (source, tiny, tmp_path / "c", dtype))]
    result = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert int(result.stdout) < 2 * largest_bytes + 8e6

"""What the tests of conversion share: reading and editing of tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import random_tensors

MEASURE_MEMORY = """
import sys
from pathlib import Path
from draftline.checkpoints.convert import convert_checkpoint
from tests.resident_memory import peak_bytes, resident_bytes

source, tiny, destination, dtype = sys.argv[1:]
convert_checkpoint(Path(tiny), Path(destination + "-tiny"), dtype, lambda done, total: None)  # code and tokenizer
before = resident_bytes()
convert_checkpoint(Path(source), Path(destination), dtype, lambda done, total: None)
print(peak_bytes() - before)
"""


def ignore_progress(done: int, total: int) -> None:
    pass


def load_all(directory: Path) -> dict[str, NDArray[Any]]:
    path = directory / "rank0.safetensors"
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def tensors_of(directory: Path, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    return random_tensors(json.loads((directory / "config.json").read_text()), seed)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def fails(source: Path, rule: str, dtype: str = "float32") -> str:
    """Convert, expecting a one-line error and nothing left behind; return its message."""
    parent = source.parent
    before = sorted(path.name for path in parent.iterdir())
    with pytest.raises(CheckpointError, match=rule) as caught:
        convert_checkpoint(source, parent / "converted", dtype, ignore_progress)
    assert sorted(path.name for path in parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)

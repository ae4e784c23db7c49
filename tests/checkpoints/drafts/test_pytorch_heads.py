"""Heads as torch saved them: the same bytes come out as from safetensors."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import SourceMethod, convert_head
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import load_json
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

torch = pytest.importorskip("torch")

WRITERS = {"eagle1": write_tiny_eagle1, "eagle3": write_tiny_eagle3, "medusa": write_tiny_medusa}
FILES = {
    "eagle1": ("model.safetensors", "pytorch_model.bin"),
    "eagle3": ("model.safetensors", "pytorch_model.bin"),
    "medusa": ("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
}


def convert(source: Path, destination: Path, method: SourceMethod) -> HeadConfig:
    target = parse_huggingface_config(load_json(source.parent / "target/config.json"), None, "float32")
    return convert_head(source, destination, method, target, "float32", lambda done, total: None)


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "medusa"])
def test_the_result_equals_that_of_safetensors(tmp_path: Path, method: SourceMethod) -> None:
    source = WRITERS[method](tmp_path / "s", write_tiny_checkpoint(tmp_path / "target"))
    expected = convert(source, tmp_path / "a", method)
    safetensors_file, torch_file = FILES[method]
    path = source / safetensors_file
    arrays = {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}
    path.unlink()
    torch.save({name: torch.from_numpy(values) for name, values in arrays.items()}, source / torch_file)
    assert convert(source, tmp_path / "b", method) == expected
    assert (tmp_path / "a/rank0.safetensors").read_bytes() == (tmp_path / "b/rank0.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["eagle1", "eagle3", "medusa"])
def test_anything_but_a_weights_only_archive_is_refused(tmp_path: Path, method: SourceMethod) -> None:
    source = WRITERS[method](tmp_path / "s", write_tiny_checkpoint(tmp_path / "target"))
    safetensors_file, torch_file = FILES[method]
    (source / safetensors_file).unlink()
    (source / torch_file).write_bytes(pickle.dumps({"0.0.linear.weight": 1}))
    with pytest.raises(CheckpointError, match="a weights-only loader can read the file"):
        convert(source, tmp_path / "c", method)
    torch.save({"0.0.linear.weight": 1}, source / torch_file)
    with pytest.raises(CheckpointError, match="the file maps names to tensors"):
        convert(source, tmp_path / "c", method)
    assert not (tmp_path / "c").exists()

"""``pytorch_model.bin``: read through the weights-only loader, refused where that refuses."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.errors import CheckpointError, MissingPackageError
from tests.tiny_checkpoints import random_tensors, write_tiny_checkpoint

torch = pytest.importorskip("torch")


def write_pytorch_checkpoint(directory: Path, dtype: str = "float32", shards: int = 1) -> Path:
    write_tiny_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    tensors = random_tensors(json.loads((directory / "config.json").read_text()), seed=0)
    state = {name: torch.from_numpy(values).to(getattr(torch, dtype)) for name, values in tensors.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    state[name] = state[name].t().contiguous().t()  # a tensor that is not contiguous
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        members = list(state)[shard::shards]
        torch.save({name: state[name] for name in members}, directory / f"pytorch_model-{shard}.bin")
        weight_map |= dict.fromkeys(members, f"pytorch_model-{shard}.bin")
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(("dtype", "shards"), [("float32", 1), ("float32", 2), ("bfloat16", 1), ("float16", 1)])
def test_the_result_equals_that_of_safetensors(tmp_path: Path, dtype: str, shards: int) -> None:
    reference = write_tiny_checkpoint(tmp_path / "reference", dtype=dtype)
    source = write_pytorch_checkpoint(tmp_path / "s", dtype, shards)
    for name, directory in (("a", reference), ("b", source)):
        convert_checkpoint(directory, tmp_path / name, "float32", lambda done, total: None)
    assert (tmp_path / "a/rank0.safetensors").read_bytes() == (tmp_path / "b/rank0.safetensors").read_bytes()


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_pickle_that_runs_code_is_refused_unrun(tmp_path: Path, as_zip: bool) -> None:
    source = write_pytorch_checkpoint(tmp_path / "s")
    content = {"model.norm.weight": Malicious(tmp_path / "owned")}
    if as_zip:
        torch.save(content, source / "pytorch_model.bin")
    else:
        (source / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: a weights-only loader can read the file"):
        convert_checkpoint(source, tmp_path / "c", "float32", lambda done, total: None)
    assert not (tmp_path / "owned").exists()


def test_anything_but_tensors_is_refused(tmp_path: Path) -> None:
    source = write_pytorch_checkpoint(tmp_path / "s")
    contents: tuple[object, ...] = ({"state_dict": {}}, [torch.zeros(1)], {1: torch.zeros(1)})
    for content in contents:
        torch.save(content, source / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="maps names to tensors"):
            convert_checkpoint(source, tmp_path / "c", "float32", lambda done, total: None)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    source = write_pytorch_checkpoint(tmp_path / "s")
    os.truncate(source / "pytorch_model.bin", 5000)
    with pytest.raises(CheckpointError, match="weights-only loader can read"):
        convert_checkpoint(source, tmp_path / "c", "float32", lambda done, total: None)


def test_without_torch_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_pytorch_checkpoint(tmp_path / "s")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError, match="pip install torch"):
        convert_checkpoint(source, tmp_path / "c", "float32", lambda done, total: None)


def test_safetensors_come_first(tmp_path: Path) -> None:
    source = write_pytorch_checkpoint(tmp_path / "s")
    shutil.copy(write_tiny_checkpoint(tmp_path / "r") / "model.safetensors", source)
    (source / "pytorch_model.bin").write_bytes(b"")
    convert_checkpoint(source, tmp_path / "c", "float32", lambda done, total: None)
    assert np.fromfile(tmp_path / "c/rank0.safetensors", np.uint8).size > 0

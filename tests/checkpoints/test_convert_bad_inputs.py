"""What conversion refuses: one line says why, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.drafts.vocabulary import check_same_tokens
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import CheckpointError
from tests.checkpoints.conversion import edit_config, fails, ignore_progress, load_all, tensors_of
from tests.tiny_checkpoints import (
    NUM_TOKENS,
    write_tiny_checkpoint,
    write_weights,
)


def rewrite(source: Path, change: Any) -> None:
    tensors: dict[str, NDArray[Any]] = dict(tensors_of(source))
    change(tensors)
    write_weights(source, tensors, "float32")


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    names = ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    rewrite(source, lambda tensors: [tensors.pop(name) for name in names])
    message = fails(source, "the checkpoint has 21 tensors; got without")
    assert all(name in message for name in names)


def test_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    names = ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.k_proj.bias")
    rewrite(source, lambda tensors: tensors.update(dict.fromkeys(names, np.zeros(64, np.float32))))
    message = fails(source, "no others")
    assert all(name in message for name in names)


def test_old_rotary_tables_are_ignored(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(source, lambda tensors: tensors.update({name: np.zeros(8, np.float32)}))
    convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)


def test_a_wrong_shape_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    edit_config(source, intermediate_size=128)
    fails(source, r"gate_proj.weight has shape \[128, 64\]; got \[96, 64\]")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(source, lambda tensors: tensors[name].__setitem__((63, 95), value))
    for dtype in ("float32", "float16"):
        fails(source, f"model.safetensors: tensor {name} is finite", dtype)


def test_a_weight_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    rewrite(source, lambda tensors: tensors["model.norm.weight"].__setitem__(3, -70000.0))
    fails(source, r"tensor model.norm.weight fits float16; got a weight of size 70000.0; .*bfloat16", "float16")
    convert_checkpoint(source, tmp_path / "c", "bfloat16", ignore_progress)


def test_a_tied_head_may_be_stored_but_must_be_equal(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", tie=True)
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    rewrite(source, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)
    assert "lm_head.weight" not in load_all(tmp_path / "c")
    rewrite(source, lambda tensors: tensors.update({"lm_head.weight": embedding * 2}))
    fails(source, "lm_head.weight equals model.embed_tokens.weight")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    tensors = tensors_of(source)
    entries = [
        TensorEntry(name, "int8", values.shape, lambda values=values: [values.astype(np.int8)])  # type: ignore[misc]
        for name, values in tensors.items()
    ]
    write_safetensors(source / "model.safetensors", entries)
    fails(source, "has one of the dtypes float32, float16, bfloat16; got int8")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    path = source / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1000)
    fails(source, "model.safetensors: the file has the")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", vocab_size=260)
    fails(source, "s/tokenizer.json: token ids are below vocab_size 260; got id 266 of 'an'")


def add_token(directory: Path, token_id: int, content: str, *, special: bool = True) -> None:
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    values["added_tokens"].append(values["added_tokens"][0] | {"id": token_id, "content": content, "special": special})
    path.write_text(json.dumps(values))


def test_special_tokens_that_the_model_has_no_rows_for_are_left_out(tmp_path: Path) -> None:
    """As Gemma 3's for a part of an image. Text that names one is text, and reads rows that are there."""
    source = write_tiny_checkpoint(tmp_path / "s", vocab_size=NUM_TOKENS)
    add_token(source, NUM_TOKENS, "<image>")
    convert_checkpoint(source, tmp_path / "c", "float32", ignore_progress)
    before, tokenizer = load_tokenizer(source), load_tokenizer(tmp_path / "c")
    assert before.encode("hello<image>")[-1] == NUM_TOKENS
    assert max(tokenizer.encode("hello<image>")) < NUM_TOKENS
    assert tokenizer.decode(tokenizer.encode("hello<image>")) == "hello<image>"
    assert before.vocabulary().items() - tokenizer.vocabulary().items() == {("<image>", NUM_TOKENS)}
    check_same_tokens(tmp_path / "c", source, NUM_TOKENS)
    with pytest.raises(CheckpointError, match="no token '<image>', as the target's has none"):
        check_same_tokens(tmp_path / "c", source, NUM_TOKENS + 1)


def test_other_tokens_behind_the_vocabulary_are_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", vocab_size=NUM_TOKENS)
    add_token(source, NUM_TOKENS, "word", special=False)
    fails(source, f"token ids are below vocab_size {NUM_TOKENS}; got id {NUM_TOKENS} of 'word'")


def test_a_missing_tokenizer_is_refused_with_its_cure(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    (source / "tokenizer.json").unlink()
    fails(source, r"AutoTokenizer.from_pretrained\(...\).save_pretrained\(...\)")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    (source / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    fails(source, "s/tokenizer.json: the tokenizers package can read it")


def test_missing_checkpoints_and_files_are_refused(tmp_path: Path) -> None:
    fails(tmp_path / "absent", "the checkpoint exists")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "config.json: the file exists")
    source = write_tiny_checkpoint(tmp_path / "s")
    (source / "model.safetensors").unlink()
    fails(source, "the folder holds one of")
    fails(source, "target.dtype: dtype is one of", "float64")


def test_shards_stay_inside_the_checkpoint_and_agree_with_their_index(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s", shards=2)
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))

    def write_index(weight_map: object) -> None:
        path.write_text(json.dumps(index | {"weight_map": weight_map}))

    for name in ("../s/model-00001-of-00002.safetensors", "/etc/passwd"):
        write_index(index["weight_map"] | {first: name})
        fails(source, "shards lie inside the checkpoint")
    write_index(index["weight_map"] | {"model.extra": "model-00001-of-00002.safetensors"})
    fails(source, "holds tensor model.extra")
    write_index([])
    fails(source, "weight_map is an object of file names")
    path.write_text("{")
    fails(source, "the file is JSON")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")

    def fail(descriptor: int, view: memoryview, write: Any = os.write) -> int:
        if len(view) > 16384:
            raise OSError(errno.ENOSPC, "full")
        return int(write(descriptor, view))

    monkeypatch.setattr(os, "write", fail)
    fails(source, "the disk has room for")


WITH_SMALL_FILES = """
import resource, sys
from pathlib import Path
from draftline.checkpoints import safetensors_file
from draftline.checkpoints.convert import convert_checkpoint

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), "float32", lambda done, total: None)
"""


def test_the_operating_system_itself_refuses_to_write_more(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "s")
    argv = [sys.executable, "-c", WITH_SMALL_FILES, str(source), str(tmp_path / "c")]
    result = subprocess.run(argv, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "CheckpointError: " in result.stderr
    assert "the disk has room for" in result.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]

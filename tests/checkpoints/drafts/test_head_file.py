"""``config.json`` of a converted head: everything written is read again, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import load_head_config
from draftline.checkpoints.drafts.head_file import write_head_config
from draftline.errors import CheckpointError
from tests.tiny_checkpoints import write_tiny_checkpoint

CONFIG = HeadConfig(
    method="eagle3",
    dtype="bfloat16",
    vocab_size=320,
    hidden_size=96,
    target_hidden_size=64,
    num_layers=1,
    draft_vocab_size=200,
    captured_layers=(0, 1, 3),
    num_attention_heads=6,
    num_key_value_heads=3,
    head_size=16,
    intermediate_size=128,
    norm_epsilon=1e-6,
    rotary_base=5e5,
    rotary_scaling={"rope_type": "linear", "factor": 2.0},
    max_position_embeddings=2048,
    captured_layer_readings=((0, 1, 3), (1, 2, 4)),
    qkv_bias=True,
    dense_bias=True,
    mlp_bias=True,
    qk_norm=True,
    feature_norm="each",
    norm_before_residual=True,
    feeds_normed=True,
    layout="EAGLE-3 of speculators",
    notes=("a note", "another"),
    owns_embedding=True,
    owns_lm_head=True,
)
MEDUSA = HeadConfig("medusa", "float16", 320, 64, 64, 1, num_heads=5, owns_medusa_lm_heads=False)


def write(directory: Path, config: HeadConfig = CONFIG, **changes: Any) -> Path:
    write_head_config(directory / "config.json", config)
    (directory / "rank0.safetensors").touch()
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize("config", [CONFIG, MEDUSA])
def test_what_is_written_is_read(tmp_path: Path, config: HeadConfig) -> None:
    assert load_head_config(write(tmp_path, config)) == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "rank0.safetensors"]


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(HeadConfig)])
def test_each_key_is_needed_and_typed(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is "):
        load_head_config(write(tmp_path, **{key: {"wrong": 1}}))
    values = json.loads((tmp_path / "config.json").read_text())
    del values[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"missing or unknown {key}; convert"):
        load_head_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"method": "eagle2"}, "method is one of eagle1, eagle3, medusa"),
        ({"dtype": "int8"}, "dtype is one of"),
        ({"head_size": -1}, "head_size is a count"),
        ({"num_heads": True}, "num_heads is a count"),
        ({"invented": 1}, "missing or unknown invented"),
    ],
)
def test_values_that_break_a_rule_are_refused(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        load_head_config(write(tmp_path, **changes))


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        load_head_config(tmp_path)
    write(tmp_path)
    (tmp_path / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a converted head holds rank0\.safetensors"):
        load_head_config(tmp_path)
    source = write_tiny_checkpoint(tmp_path / "target")
    convert_checkpoint(source, tmp_path / "converted", "float32", lambda done, total: None)
    with pytest.raises(CheckpointError, match="the keys of a converted head"):
        load_head_config(tmp_path / "converted")

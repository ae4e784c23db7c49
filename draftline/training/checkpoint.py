"""The state of a training that goes on after a kill: one file, replaced whole.

Random numbers are no part of it: those of a step follow from the seed and the step's number.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftline.checkpoints.disk_space import disk_full_named
from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

STATE_FILE = "state.pt"
CURE = "move it away, and training starts anew"


@dataclass(frozen=True)
class Position:
    """Where a training is: ``batch`` of ``epoch`` is the next one. ``log_bytes``: the log's length at this moment."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    log_bytes: int = 0
    is_finished: bool = False


@dataclass(frozen=True)
class State:
    """``made_from`` names what the training started from; another value belongs to another training."""

    position: Position
    made_from: Mapping[str, str]
    head: Mapping[str, Any]
    optimizer: Mapping[str, Any]


def save_state(directory: Path, state: State) -> None:
    """Replace the state in ``directory``; after a kill or a power cut there is the old one or the new one.

    Raises: CheckpointError where the disk is full; the old state stays.
    """
    path = directory / STATE_FILE
    tensors = [value for value in state.head.values() if isinstance(value, torch.Tensor)]
    num_bytes = 3 * sum(tensor.nbytes for tensor in tensors)  # the optimiser keeps two numbers of each weight
    with disk_full_named(path, num_bytes):
        with replace_file(path) as partial, partial.open("wb") as file:
            torch.save({**vars(state), "position": asdict(state.position)}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(directory)


def load_state(directory: Path) -> State | None:
    """Return the state in ``directory``, None where there is none. Tensors come to the CPU.

    Raises: ArtifactError where the file is damaged.
    """
    path = directory / STATE_FILE
    if not path.exists():
        return None
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
        return replace(State(**values), position=Position(**values["position"]))
    except (RuntimeError, EOFError, pickle.UnpicklingError, TypeError, KeyError, ValueError) as error:
        got = str(error).partition("\n")[0]
        raise ArtifactError(path, "is the state of a training", got, CURE) from error


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

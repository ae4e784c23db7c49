"""A tiny target that answers, and prompts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftline.checkpoints.convert import convert_checkpoint
from draftline.training.answers import describe_answers
from draftline.training.description import Description
from draftline.training.prompts import Prompt
from tests.tiny_checkpoints import write_tiny_checkpoint

NUM_LAYERS = 3


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"letters/{number}", chr(97 + number % 26) * (1 + number)) for number in range(count)]


def write_converted_target(directory: Path, **options: Any) -> Path:
    """Write a tiny checkpoint and convert it below ``directory``."""
    write_tiny_checkpoint(directory / "target", num_layers=NUM_LAYERS, **options)
    convert_checkpoint(directory / "target", directory / "converted", "float32", lambda done, total: None)
    return directory / "converted"


def describe_tiny(checkpoint: Path, **changes: Any) -> Description:
    values: dict[str, Any] = {
        "captured_layers": (0, 1),
        "weights_dtype": "float32",
        "pool_dtype": "float32",
        "prompts": ("letters",),
        "temperature": 0.8,
        "max_tokens": 24,
        "seed": 5,
        "max_user_tokens": 16,
    }
    return describe_answers(checkpoint, **(values | changes))

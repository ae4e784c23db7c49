"""What every reader hands to the converter: a configuration and named tensors that stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from draftline.checkpoints.config import CheckpointConfig


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source checkpoint, under its Hugging Face name.

    ``chunks()`` yields flat arrays of ``dtype`` in row-major order; an array is valid until the next one is asked for.
    ``where`` is the file, for error messages.
    """

    where: Path
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[NDArray[Any]]]


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint to convert. ``write_tokenizer(directory)`` writes the tokenizer and generation files.

    ``notes``: what whoever converts it is to know, a line each: how it was quantised.
    """

    where: Path
    config: CheckpointConfig
    tensors: Mapping[str, SourceTensor]
    write_tokenizer: Callable[[Path], None]
    notes: tuple[str, ...] = ()

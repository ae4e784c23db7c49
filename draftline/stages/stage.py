"""What a stage is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.config import Pipeline
from draftline.share import SharedFolder

Advance = Callable[[int, int], None]  # how much is done, of how much
Say = Callable[[str], None]  # one line for whoever runs the pipeline


@dataclass(frozen=True)
class StageCall:
    """What a stage works with: it writes into ``destination``, an empty directory beside the other stages' outputs.

    ``source`` is the resolved target checkpoint, ``draft_sources`` are those of ``pipeline.draft``, None for one
    without weights; ``build_directory`` holds the outputs of earlier stages. ``say`` prints a line.
    """

    pipeline: Pipeline
    source: Path
    draft_sources: tuple[Path | None, ...]
    build_directory: Path
    destination: Path
    advance: Advance
    say: Say


@dataclass(frozen=True)
class Stage:
    """A stage and all that its output depends on.

    ``settings`` are dotted fields of the pipeline (one of ``draft`` is that of each draft), ``needs`` names earlier
    stages, ``reads`` single files of earlier stages' directories, ``packages`` distributions, ``modules`` and
    ``shared`` (folders of ``share_path``) draftline's own code, what that imports included. ``reads_source``: the files
    of the target's checkpoint and of the drafts' are an input. ``machine`` names what else of this machine the output
    depends on, for a pipeline. ``run`` returns a dataclass, and raises to fail.
    """

    name: str
    directory: str
    run: Callable[[StageCall], Any]
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    shared: tuple[SharedFolder, ...] = ()
    reads_source: bool = False
    machine: Callable[[Pipeline], Mapping[str, str]] = lambda pipeline: {}

    def settings_of(self, pipeline: Pipeline) -> Mapping[str, object]:
        """Return the values of ``settings``; None for those of an absent block."""
        return {name: setting_of(pipeline, name) for name in self.settings}


def setting_of(pipeline: Pipeline, name: str) -> object:
    """Return the value of a field by its dotted name: of ``draft`` a list, None where its block is absent."""
    block_name, _, key = name.rpartition(".")
    block = getattr(pipeline, block_name) if block_name else pipeline
    if isinstance(block, tuple):
        return [getattr(draft, key) for draft in block]
    return None if block is None else getattr(block, key)

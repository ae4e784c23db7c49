"""What the output of a stage depends on, as names and hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import draftline
from draftline.config import Pipeline
from draftline.manifest import FileHasher, FileRecord
from draftline.stages.code import code_sha256
from draftline.stages.stage import Stage


def stage_inputs(stage: Stage, pipeline: Pipeline) -> dict[str, str]:
    """Return the inputs that are no files of the user: settings, versions, and the code that does the work."""
    inputs = {"draftline": draftline.__version__, "code": code_sha256(stage.modules, stage.shared)}
    inputs |= {f"setting {name}": json.dumps(value) for name, value in stage.settings_of(pipeline).items()}
    inputs |= {f"package {name}": package_version(name) for name in stage.packages}
    inputs |= stage.machine(pipeline)
    return inputs


def source_records(
    source: Path, known: Mapping[str, FileRecord], hasher: FileHasher, prefix: str = ""
) -> dict[str, FileRecord]:
    """Return the records of a checkpoint's files by ``prefix`` and name, hidden ones excepted.

    ``source`` is a file or a folder.
    """
    files = [source] if source.is_file() else sorted(path for path in source.iterdir() if path.is_file())
    visible = {f"{prefix}{path.name}": path for path in files if not path.name.startswith(".")}
    return {name: hasher.record(path, known.get(name)) for name, path in visible.items()}


@cache
def package_version(name: str) -> str:
    """Return the installed version of a distribution, or ``absent``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"

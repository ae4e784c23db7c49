"""Import packages that only some checkpoints need."""

from __future__ import annotations

import importlib
from typing import Any

from draftline.errors import MissingPackageError


def import_optional(name: str, feature: str, pip_line: str) -> Any:
    """Import a module, or raise MissingPackageError with the pip line that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(feature, f"the package {name} is installed", "no such package", pip_line) from error

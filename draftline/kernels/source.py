"""The kernels' source: the package ``plugins/tree_attention/gpu``, imported from wherever ``plugins`` is."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from draftline.errors import MissingPackageError
from draftline.share import share_path

MODULES = {
    "tree_attention": "attention",
    "tree_attention_reduce": "reduce",
    "commit_rows": "commit",
    "tree_attention_quick": "quick",
}
PIP_LINE = 'pip install "draftline[kernels]"'
_PACKAGE = "draftline_tree_attention_gpu"


def source_path() -> Path:
    return share_path("plugins") / "tree_attention" / "gpu"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Hash the kernels' source: names and bytes of its files."""
    digest = hashlib.sha256()
    for path in sorted(source_path().glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def import_triton() -> ModuleType:
    """Import Triton (the language), or raise MissingPackageError with the pip line."""
    try:
        return importlib.import_module("triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        where, rule = "kernels for NVIDIA GPUs", "the package triton (the language) is installed"
        raise MissingPackageError(where, rule, "no such package", PIP_LINE) from error


def load_kernel(name: str) -> Any:
    """Return a kernel of ``MODULES``: what ``triton.jit`` made of it, or its interpreter under TRITON_INTERPRET=1."""
    import_triton()
    if _PACKAGE not in sys.modules:
        folder = source_path()
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        sys.modules[_PACKAGE] = package
    return getattr(importlib.import_module(f"{_PACKAGE}.{MODULES[name]}"), name)

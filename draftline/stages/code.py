"""The code that a stage's output depends on: modules of draftline, found by following their imports."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import draftline
from draftline.share import SharedFolder, share_path

PACKAGE = Path(draftline.__file__).parent
ABOVE_THE_WORK = ("draftline.config", "draftline.stages.stage")  # what they say arrives as settings


def code_sha256(modules: Iterable[str], shared: Iterable[SharedFolder] = ()) -> str:
    """Return a hash of ``modules``, of all modules of draftline they import, and of the files of ``shared`` folders.

    The modules that Python files in the shared folders import count as well.
    """
    files: dict[str, Path] = {}
    waiting = list(modules)
    for shared_folder in shared:
        folder = share_path(shared_folder)
        for path in _files(folder):
            files[f"{shared_folder}/{path.relative_to(folder)}"] = path
            waiting += imported_modules(path) if path.suffix == ".py" else ()
    while waiting:
        module = waiting.pop()
        file = module_path(module)
        if file is None or module in files or module.startswith(ABOVE_THE_WORK):
            continue
        files[module] = file
        waiting += imported_modules(file)
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def module_path(module: str) -> Path | None:
    """Return the file of a module of draftline, None where the name is no module."""
    parts = module.split(".")
    if parts[0] != draftline.__name__:
        return None
    path = PACKAGE.joinpath(*parts[1:])
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def imported_modules(path: Path) -> tuple[str, ...]:
    """Return the modules of draftline that a file imports, wherever in it; not those for type checking only."""
    return tuple(sorted(set(_imports(ast.parse(path.read_bytes())))))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if module_path(alias.name))
    elif isinstance(node, ast.ImportFrom) and node.module is not None and module_path(node.module):
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [module for module in submodules if module_path(module)]
        yield from found
        if len(found) < len(submodules):  # some names are the package's own
            yield node.module
    for child in ast.iter_child_nodes(node):
        yield from _imports(child)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]

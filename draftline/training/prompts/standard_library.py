"""Documented functions and modules of Python's standard library, read without importing any of it."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Absent from some distributions of Python, or not for users.
_LEFT_OUT = frozenset(
    {"antigravity", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "this", "tkinter", "turtledemo"}
)


@dataclass(frozen=True)
class Function:
    """``signature``: as in the source, ``(a, b=1)``, without ``self``. ``description``: the docstring."""

    module: str
    name: str
    signature: str
    description: str


@dataclass(frozen=True)
class Module:
    name: str
    description: str
    functions: tuple[Function, ...]


@lru_cache(maxsize=1)
def documented_modules() -> tuple[Module, ...]:
    """Return the public modules, by name, with the docstrings of their own and of their public functions and methods.

    They are those of the running Python, so its version decides about them.
    """
    return tuple(_read(name, path) for name, path in _sources())


def _sources() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for top in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if top.startswith("_"):
            continue
        paths = sorted((root / top).rglob("*.py")) if (root / top).is_dir() else [root / f"{top}.py"]
        for path in paths:
            parts = [part for part in path.relative_to(root).with_suffix("").parts if part != "__init__"]
            if path.is_file() and not any(part.startswith("_") or part.startswith("test") for part in parts):
                yield ".".join(parts), path


def _read(name: str, path: Path) -> Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, Function] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            description = ast.get_docstring(node)
            if description:
                found.setdefault(node.name, Function(name, node.name, _signature(node), description))
    return Module(name, ast.get_docstring(tree) or "", tuple(found[key] for key in sorted(found)))


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    positional = arguments.args.posonlyargs or arguments.args.args
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(arguments.args)}){returns}"

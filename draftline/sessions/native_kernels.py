"""The library of native CPU operators: where it is, what it runs on, and when an engine uses it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Literal

from draftline.errors import BuildError

Kernels = Literal["native", "onnxruntime"]
MODULE = "draftline.sessions.cpu_kernels"  # no Python module, but found as one, in a wheel and beside a checkout


@functools.cache
def find_library() -> Path | None:
    """Return the library that the build of the package compiled; None where there was no compiler."""
    spec = importlib.util.find_spec(MODULE)
    return None if spec is None or spec.origin is None else Path(spec.origin)


@functools.cache
def instruction_set() -> str | None:
    """Name the instruction set of the native operators; None without the library, or where this processor runs none."""
    path = find_library()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.draftline_instruction_set.restype = ctypes.c_char_p
    return library.draftline_instruction_set().decode() or None


def choose_kernels(wanted: Literal["auto", "native", "onnxruntime"]) -> Kernels:
    """Return the kernels to build an engine for; ``auto`` is ``native`` where this machine has them.

    Raises: BuildError for ``native`` where it has not.
    """
    if wanted == "onnxruntime":
        return "onnxruntime"
    if instruction_set() is not None:
        return "native"
    if wanted == "auto":
        return "onnxruntime"
    raise BuildError("engine.kernels", "native needs the compiled library", why_not_native(), CURE)


CURE = "install draftline from a wheel or with a C++ compiler, or set engine.kernels to onnxruntime"


def why_not_native() -> str:
    """Say why there are no native operators here."""
    return "none" if find_library() is None else "a processor with neither AVX2 nor NEON"

"""The library of native CPU operators: where it is, what it runs on, and when an engine uses it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Literal

from draftline.errors import ArtifactError, BuildError

Kernels = Literal["native", "onnxruntime"]
WantedKernels = Literal["auto", "native", "onnxruntime"]
MODULE = "draftline.sessions.cpu_kernels"  # no Python module, but found as one, in a wheel and beside a checkout
CURE = "install draftline from a wheel or with a C++ compiler, or set engine.kernels to onnxruntime"


@functools.cache
def find_library() -> Path | None:
    """Return the library that the build of the package compiled; None where there was no compiler."""
    spec = importlib.util.find_spec(MODULE)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def instruction_set() -> str | None:
    """Name the instruction set of the native operators; None without the library, or where this processor runs none."""
    return _load(find_library())[0]


def why_not_native() -> str:
    """Say why there are no native operators here."""
    return _load(find_library())[1]


@functools.cache
def _load(path: Path | None) -> tuple[str | None, str]:
    """Return the instruction set that the library takes, None for none; and what there is instead then."""
    if path is None:
        return None, "none"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # of another architecture, or for a newer system
        return None, f"one that does not load ({error})"
    library.draftline_instruction_set.restype = ctypes.c_char_p
    name = library.draftline_instruction_set().decode()
    return name or None, "a processor with neither AVX2 nor NEON"


def choose_kernels(wanted: WantedKernels) -> Kernels:
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


def describe_kernels(wanted: WantedKernels) -> str:
    """Name what an engine's kernels follow from on this machine; another answer asks for another build."""
    path = find_library()
    if wanted == "onnxruntime":
        return "onnxruntime"
    if path is None or instruction_set() is None:
        return "no native library"
    return f"native library {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def library_of_engine(directory: Path) -> Path:
    """Return the library for the engine in ``directory``, which was built for native operators.

    Raises: ArtifactError where this machine has no library, or cannot run it.
    """
    path = find_library()
    if path is None or instruction_set() is None:
        rule = "an engine of native kernels needs the compiled library"
        raise ArtifactError(directory, rule, why_not_native(), f"{CURE} and build the engine again")
    return path

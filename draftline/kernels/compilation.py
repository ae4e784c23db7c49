"""Compile the kernels ahead of time: Triton language -> PTX -> cubin, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftline.errors import BuildError
from draftline.kernels.cache import load_or_compile
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import MODULES

__all__ = ["ARCHITECTURES", "CompiledKernel", "compile_kernels"]


def compile_kernels(
    shape: KernelShape,
    architectures: Sequence[int],
    cache: Path | None = None,
    configuration: KernelConfiguration | None = None,
) -> tuple[CompiledKernel, ...]:
    """Compile the three kernels for each of ``architectures``, in that order.

    ``cache``: a folder of kernels by the hash of their source and of all that they are compiled with; None = compile
    anew. ``configuration``: None = the default of the shape on each architecture.

    Raises: BuildError for an architecture that is not among ``ARCHITECTURES``, or whose shared memory is too small for
    the configuration; MissingPackageError without Triton; ArtifactError for a damaged file in the cache.
    """
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            known = ", ".join(map(str, ARCHITECTURES))
            raise BuildError("TreeAttention kernel", f"architecture is one of {known}", architecture, "choose of them")
    return tuple(
        load_or_compile(name, shape, configuration or default_configuration(shape, architecture), architecture, cache)
        for architecture in architectures
        for name in MODULES
    )

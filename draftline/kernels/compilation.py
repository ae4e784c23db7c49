"""Compile the kernels ahead of time: Triton language -> PTX -> cubin, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftline.errors import BuildError
from draftline.kernels.arguments import QUICK
from draftline.kernels.cache import load_or_compile
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import MODULES

__all__ = ["ARCHITECTURES", "CompiledKernel", "compile_kernels", "compile_quick_kernel"]

ENGINE_KERNELS = tuple(name for name in MODULES if name != QUICK)


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
        _check_architecture(architecture)
    return tuple(
        load_or_compile(name, shape, configuration or default_configuration(shape, architecture), architecture, cache)
        for architecture in architectures
        for name in ENGINE_KERNELS
    )


def compile_quick_kernel(
    shape: KernelShape, architecture: int, shared_bytes: int, cache: Path | None = None
) -> CompiledKernel:
    """Compile the kernel of TensorRT's quick plugin: the default of the shape, with all keys in one section.

    It has as many stages as fit in ``shared_bytes``, one at least.

    Raises: as ``compile_kernels``.
    """
    _check_architecture(architecture)
    configuration = replace(default_configuration(shape, architecture), max_sections=1)
    kernel = load_or_compile(QUICK, shape, configuration, architecture, cache)
    while kernel.shared_bytes > shared_bytes and configuration.num_stages > 1:
        configuration = replace(configuration, num_stages=configuration.num_stages - 1)
        kernel = load_or_compile(QUICK, shape, configuration, architecture, cache)
    return kernel


def _check_architecture(architecture: int) -> None:
    if architecture not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise BuildError("TreeAttention kernel", f"architecture is one of {known}", architecture, "choose of them")

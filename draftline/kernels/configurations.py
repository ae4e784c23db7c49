"""Configurations of the kernels by shape and architecture."""

from __future__ import annotations

from draftline.kernels.shape import KernelConfiguration, KernelShape


def default_configuration(shape: KernelShape, architecture: int) -> KernelConfiguration:
    """Return the configuration of ``shape`` on ``architecture``; only warps and stages depend on the latter."""
    return KernelConfiguration(64, 32, 256, 16, 16, 64, 4, 2)

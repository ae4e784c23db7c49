"""One call of the plugin on a GPU: which kernels, with which arguments, on the engine's stream."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from draftline.errors import ArtifactError
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.launches import attention_launches, num_sections
from draftline.kernels.shape import KernelConfiguration
from draftline.sessions.tensorrt.cuda_driver import CudaDriver, load_driver
from draftline.sessions.tensorrt.plugin_kernels import SCRATCH, PluginKernels


@dataclass(frozen=True)
class AttentionCall:
    """``pointers``: device addresses by name, those of ``POINTERS``. ``stream``: handle of a CUDA stream.

    ``key_scale``, ``value_scale``: of a float8 pool.
    """

    kernels: PluginKernels
    pointers: Mapping[str, int]
    num_tokens: int
    num_sequences: int
    max_blocks: int
    mask_words: int
    scale: float
    stream: int
    key_scale: float = 1.0
    value_scale: float = 1.0

    def arguments(self, configuration: KernelConfiguration) -> dict[str, int | float]:
        """Return everything that kernels of ``configuration`` may ask for, by name."""
        return {
            **self.pointers,
            **dict.fromkeys(SCRATCH, 0),
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "max_blocks": self.max_blocks,
            "mask_words": self.mask_words,
            "scale": self.scale,
            "key_scale": self.key_scale,
            "value_scale": self.value_scale,
            "num_sections": num_sections(self.kernels.shape, configuration, self.max_blocks),
        }


def run_attention(call: AttentionCall) -> None:
    """Launch the kernels of ``call`` on the GPU of the calling thread's context.

    Raises: ArtifactError where there is no GPU, or no code for it.
    """
    driver = load_driver()
    if driver is None:
        raise ArtifactError("plugin TreeAttention", "runs on a GPU", "none", "run the engine where there is one")
    launch_attention(driver, call)


def launch_attention(driver: CudaDriver, call: AttentionCall) -> None:
    """Launch the kernels of ``call`` through ``driver``."""
    kernels, context = call.kernels, driver.context()
    architecture = _architecture(driver, context, kernels)
    configuration = kernels.find("tree_attention", architecture).configuration
    values = call.arguments(configuration)
    sizes = call.num_tokens, call.num_sequences, call.max_blocks
    for launch in attention_launches(kernels.shape, configuration, *sizes):
        kernel, function = _function(driver, context, kernels, launch.kernel, architecture)
        arguments = [(kind, values[name]) for name, kind in zip(kernel.arguments, kernel.argument_types, strict=True)]
        driver.launch(function, launch.grid, 32 * kernel.num_warps, kernel.shared_bytes, call.stream, arguments)


@functools.cache
def _architecture(driver: CudaDriver, context: int, kernels: PluginKernels) -> int:
    return kernels.fitting(driver.architecture())


@functools.cache
def _function(
    driver: CudaDriver, context: int, kernels: PluginKernels, name: str, architecture: int
) -> tuple[CompiledKernel, int]:
    """Return a kernel and its handle in ``context``; loaded once in each."""
    kernel = kernels.find(name, architecture)
    return kernel, driver.load_function(kernel.cubin, kernel.entry, kernel.shared_bytes)

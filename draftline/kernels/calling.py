"""Call the kernels on tensors: of a GPU, or of the CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

from draftline.kernels.arguments import SIGNATURES, compiler_options, constants
from draftline.kernels.launches import attention_launches, num_sections, workspace_bytes
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import load_kernel


def call_attention(
    shape: KernelShape,
    configuration: KernelConfiguration,
    inputs: dict[str, Any],
    out: Any,
    *,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    is_interpreted: bool = False,
) -> None:
    """Write ``TreeAttention`` of ``inputs`` (tensors by the operator's names) to ``out``; a float8 pool is uint8."""
    import torch

    num_tokens, mask_words = inputs["packed_mask"].shape
    num_sequences, max_blocks = inputs["block_table"].shape
    size = workspace_bytes(shape, configuration, num_tokens, num_sequences, max_blocks) // 4
    arguments = {
        **inputs,
        "out": out,
        "workspace": out.new_empty((max(1, size),), dtype=torch.float32),
        "scale": scale,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "num_tokens": num_tokens,
        "num_sequences": num_sequences,
        "max_blocks": max_blocks,
        "mask_words": mask_words,
        "num_sections": num_sections(shape, configuration, max_blocks),
    }
    for launch in attention_launches(shape, configuration, num_tokens, num_sequences, max_blocks):
        compiled_with = constants(launch.kernel, shape, configuration)
        if "DOT_IN_FLOAT32" in compiled_with:
            compiled_with["DOT_IN_FLOAT32"] = is_interpreted
        own = [arguments[name] for name in SIGNATURES[launch.kernel]]
        if not is_interpreted:
            compiled_with |= compiler_options(launch.kernel, configuration)
        load_kernel(launch.kernel)[launch.grid](*own, **compiled_with)

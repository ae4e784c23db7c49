"""Call the kernels on tensors: of a GPU, or of the CPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

from draftline.kernels.arguments import SIGNATURES, compiler_options, constants
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.launches import Launch, attention_launches, commit_launch, num_sections, workspace_bytes
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
    """Write ``TreeAttention`` of ``inputs`` (tensors by the operator's names) to ``out``; a float8 pool is uint8.

    Rows behind ``sequence_starts[-1]`` are left as they are.
    """
    import torch

    num_tokens, mask_words = inputs["packed_mask"].shape
    num_sequences, max_blocks = inputs["block_table"].shape
    size = workspace_bytes(shape, configuration, num_tokens, num_sequences, max_blocks) // 4
    arguments = {
        **inputs,
        "out": out,
        "workspace": out.new_empty((size,), dtype=torch.float32),
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
        _call(launch, shape, configuration, arguments, is_interpreted)


def call_commit(
    shape: KernelShape,
    kv_rows: Any,
    rows: Any,
    slots: Any,
    kv_pools: Any,
    scales: Any,
    *,
    is_interpreted: bool = False,
) -> None:
    """Write rows ``rows[i]`` of ``kv_rows [T, 2 L K, D]`` to ``slots[i]`` of ``kv_pools [L, num_blocks, 2, K, S, D]``.

    ``scales [L, 2]``: of keys and values of each layer; read where the pool is float8, which is uint8 here.
    """
    arguments = {
        "kv_rows": kv_rows,
        "rows": rows,
        "slots": slots,
        "kv_pools": kv_pools,
        "scales": scales,
        "layer_stride": kv_pools.stride(0),
    }
    configuration = default_configuration(shape, ARCHITECTURES[0])  # nothing in commit depends on it
    _call(commit_launch(len(rows), len(kv_pools)), shape, configuration, arguments, is_interpreted)


def _call(
    launch: Launch,
    shape: KernelShape,
    configuration: KernelConfiguration,
    arguments: dict[str, Any],
    is_interpreted: bool,
) -> None:
    fixed = constants(launch.kernel, shape, configuration)
    if is_interpreted:
        fixed |= {"DOT_IN_FLOAT32": True} if launch.kernel == "tree_attention" else {}
    else:
        fixed |= compiler_options(launch.kernel, configuration)
    own = [arguments[name] for name in SIGNATURES[launch.kernel]]
    load_kernel(launch.kernel)[launch.grid](*own, **fixed)

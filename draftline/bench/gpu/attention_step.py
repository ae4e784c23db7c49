"""A decoding step of attention in the memory of a GPU, enqueued as the plugin does it: what is timed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftline.bench.gpu.device import STREAM, Gpu
from draftline.kernels.cases import NUMPY_DTYPES
from draftline.kernels.counted import CountedStep
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels
from draftline.sessions.tensorrt.plugin_launch import AttentionCall, launch_attention
from draftline.tree import build_tree_mask, chain_parents, pack_mask

POOL_BYTE = 0x2C  # of every number of the pool: 0.06 in float16, 2e-12 in bfloat16 and float32, 0.75 in float8


def decoding_step(shape: KernelShape, num_sequences: int, num_nodes: int, context: int) -> CountedStep:
    """Return the integers of ``num_sequences`` chains of ``num_nodes`` behind ``context`` tokens each."""
    mask = pack_mask(build_tree_mask(chain_parents(num_nodes)))
    return CountedStep(
        np.full(num_sequences, context, np.int32),
        np.arange(num_sequences + 1, dtype=np.int32) * num_nodes,
        np.tile(mask, (num_sequences, 1)),
        -(-context // shape.block_size),
    )


def pool_bytes(shape: KernelShape, step: CountedStep) -> int:
    blocks = len(step.context_lengths) * step.max_blocks
    width = np.dtype(NUMPY_DTYPES[shape.kv_dtype]).itemsize
    return blocks * 2 * shape.num_kv_heads * shape.block_size * shape.head_size * width


@dataclass
class AttentionStep:
    """``addresses``: of what ``free`` gives back."""

    call: AttentionCall
    addresses: tuple[int, ...]

    def enqueue(self, gpu: Gpu) -> None:
        launch_attention(gpu.driver, self.call)

    def free(self, gpu: Gpu) -> None:
        gpu.free(*self.addresses)


def place_step(gpu: Gpu, kernels: PluginKernels, step: CountedStep) -> AttentionStep:
    """Put a step's arrays on the GPU: blocks in random order, one number in all of the pool, random rows."""
    shape, random = kernels.shape, np.random.default_rng(0)
    num_sequences, (num_tokens, words) = len(step.context_lengths), step.packed_mask.shape
    rows = {"q": shape.num_heads, "k_new": shape.num_kv_heads, "v_new": shape.num_kv_heads}
    table = random.permutation(num_sequences * step.max_blocks).astype(np.int32).reshape(num_sequences, -1)
    arrays = {
        name: random.standard_normal((num_tokens, heads, shape.head_size)).astype(NUMPY_DTYPES[shape.dtype])
        for name, heads in rows.items()
    } | {
        "block_table": table,
        "context_lengths": step.context_lengths,
        "sequence_starts": step.sequence_starts,
        "packed_mask": step.packed_mask,
        "sinks": np.zeros(shape.num_heads, np.float32),
    }
    sizes = {
        "kv_pool": pool_bytes(shape, step),
        "out": num_tokens * shape.num_heads * shape.head_size * np.dtype(NUMPY_DTYPES[shape.dtype]).itemsize,
        "workspace": kernels.workspace_bytes(num_tokens, num_sequences, step.max_blocks),
    }
    pointers = {name: gpu.upload(array) for name, array in arrays.items()}
    pointers |= {name: gpu.allocate(size) for name, size in sizes.items()}
    gpu.fill(pointers["kv_pool"], POOL_BYTE, sizes["kv_pool"])
    scale = float(shape.head_size**-0.5)
    call = AttentionCall(kernels, pointers, num_tokens, num_sequences, step.max_blocks, words, scale, STREAM)
    return AttentionStep(call, tuple(pointers.values()))

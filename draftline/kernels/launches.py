"""What a call launches: kernels, grids, workspace. From the host's integers alone."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.kernels.shape import KernelConfiguration, KernelShape


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, int, int]


def num_sections(shape: KernelShape, configuration: KernelConfiguration, max_blocks: int) -> int:
    """Return the sections that the longest sequence of a block table of ``max_blocks`` columns can have."""
    keys = max_blocks * shape.block_size
    if shape.window > 0:
        keys = min(keys, shape.window + configuration.tile_keys)
    least = max(configuration.min_section_keys, configuration.min_keys_per_row * shape.group)
    return max(1, min(configuration.max_sections, keys // least))


def workspace_bytes(
    shape: KernelShape, configuration: KernelConfiguration, num_tokens: int, num_sequences: int, max_blocks: int
) -> int:
    """Return the size of ``workspace``: per row, head and section a weighted sum of values, a maximum and a sum.

    Greatest where all arguments are. No sequence has more than ``max_split_rows`` rows there.
    """
    sections = num_sections(shape, configuration, max_blocks)
    if sections == 1:
        return 0
    rows = min(num_tokens, num_sequences * configuration.max_split_rows)
    return rows * shape.num_heads * sections * (shape.head_size + 2) * 4


def attention_launches(
    shape: KernelShape, configuration: KernelConfiguration, num_tokens: int, num_sequences: int, max_blocks: int
) -> tuple[Launch, ...]:
    """Return the launches of one TreeAttention, in order, on one stream.

    A sequence has a row at least, so B sequences of T rows have ``(T - B) // R + B`` tiles of R rows at most.
    """
    rows = configuration.tile_rows // shape.group
    tiles = (num_tokens - num_sequences) // rows + num_sequences
    sections = num_sections(shape, configuration, max_blocks)
    attention = Launch("tree_attention", (tiles, shape.num_kv_heads, sections))
    if sections == 1:
        return (attention,)
    return (attention, Launch("tree_attention_reduce", (num_tokens, shape.num_heads, 1)))


def commit_launch(num_rows: int, num_layers: int) -> Launch:
    """Return the launch that writes ``num_rows`` accepted rows to the pools of all layers."""
    return Launch("commit_rows", (num_rows, 2 * num_layers, 1))

"""How long a TreeAttention takes on a card, from counts and data sheets: what chooses configurations without a GPU.

A model to rank by, not to quote: of what limits a kernel (memory, cache, products, and the time of one program after
the other) the slowest counts. The constants below are assumptions, the same for all cards;
``draftline.kernels.tuning`` measures where there is a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftline.kernels.devices import SHARED_BYTES, Device
from draftline.kernels.shape import DTYPE_BYTES, KernelConfiguration, KernelShape

LAUNCH_US = 2.0
START_US = 2.0  # of a program: its sequence is looked up, its first tile comes from memory
TILE_US = 0.6  # of a tile of keys in a program whose next one is on its way
CACHE_RATE = 2.5  # times that of memory
PRODUCT_SHARE = 0.4  # of the data sheet's rate
REGISTERS = 224  # of a thread; a multiprocessor has 65,536
NODE_TILE = 32


@dataclass(frozen=True)
class Workload:
    """A step of ``num_sequences`` sequences of ``num_nodes`` in-step tokens behind ``context`` tokens each."""

    num_sequences: int
    num_nodes: int
    context: int


# Plain decoding and trees, alone and in batches, a long context, and a prefill chunk.
WORKLOADS = (
    Workload(1, 1, 2048),
    Workload(1, 16, 2048),
    Workload(16, 16, 2048),
    Workload(32, 1, 2048),
    Workload(1, 1, 32768),
    Workload(1, 512, 2048),
)


def predict_us(
    shape: KernelShape, configuration: KernelConfiguration, architecture: int, device: Device, workload: Workload
) -> float:
    """Predict microseconds of one call, both kernels.

    >>> from draftline.kernels.devices import DEVICES
    >>> shape, alone = KernelShape(32, 8, 128, 16), Workload(1, 1, 32768)
    >>> one, many = (KernelConfiguration(64, 64, 256, 32, sections, 64, 4, 2) for sections in (1, 16))
    >>> predict_us(shape, one, 90, DEVICES[90], alone) > 5 * predict_us(shape, many, 90, DEVICES[90], alone)
    True
    """
    kv_heads, size = shape.num_kv_heads, shape.head_size
    context = min(workload.context, shape.window) if shape.window > 0 else workload.context
    least = max(configuration.min_section_keys, configuration.min_keys_per_row * shape.group * workload.num_nodes)
    sections = max(1, min(context // least, configuration.max_sections))
    if workload.num_nodes > configuration.max_split_rows:
        sections = 1
    keys = -(-context // sections)
    tiles = -(-workload.num_nodes // (configuration.tile_rows // shape.group))
    programs = workload.num_sequences * tiles * kv_heads * sections

    pool_bytes = workload.num_sequences * kv_heads * context * size * 2 * DTYPE_BYTES[shape.kv_dtype]
    rows = workload.num_sequences * workload.num_nodes * shape.num_heads
    partial_bytes = 0 if sections == 1 else 2 * rows * sections * (size + 2) * 4
    products = programs * configuration.tile_rows * (keys + workload.num_nodes) * size * 4
    bytes_per_us = device.memory_gb_per_s * 1e3
    limits = (
        pool_bytes / bytes_per_us,
        (tiles * pool_bytes + partial_bytes) / (bytes_per_us * CACHE_RATE),
        products / (device.tflops * 1e6 * PRODUCT_SHARE),
        _program_waves(shape, configuration, architecture, device, programs)
        * (START_US + TILE_US * (-(-keys // configuration.tile_keys) + -(-workload.num_nodes // NODE_TILE))),
    )
    return LAUNCH_US * (1 if sections == 1 else 2) + max(limits)


def _program_waves(
    shape: KernelShape, configuration: KernelConfiguration, architecture: int, device: Device, programs: int
) -> int:
    """Return how often the card is filled with programs, by their registers and shared memory."""
    element = DTYPE_BYTES[shape.dtype]
    shared = (configuration.tile_rows + 2 * configuration.tile_keys * (configuration.num_stages - 1)) * shape.head_size
    resident = min(
        65536 // (REGISTERS * 32 * configuration.num_warps), SHARED_BYTES[architecture] // (shared * element)
    )
    return -(-programs // (device.num_sms * max(1, resident)))

"""Configurations of the kernels by shape and architecture."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from draftline.kernels.cost import WORKLOADS, predict_us
from draftline.kernels.devices import DEVICES, SHARED_BYTES
from draftline.kernels.shape import DTYPE_BYTES, KernelConfiguration, KernelShape

MAX_SPLIT_ROWS = 64
# A row's partial result of a section is written and read in float32, and its query is read again: with so many bytes of
# keys (and of values) to a row and column, that is 8 % of the section's keys and values.
PARTIAL_KEY_BYTES = 64
SECTION_KEYS = (128, 256, 512, 1024)
MAX_SECTIONS = (8, 16, 32)


class Tile(NamedTuple):
    rows: int
    keys: int
    num_stages: int = 2
    num_warps: int = 4


def largest_tile(shape: KernelShape, architecture: int) -> Tile:
    """Return the largest tile whose program spills no registers, of four warps where that is possible.

    Found by compiling (``python -m draftline.kernels.report`` shows registers and spills). A tile of 64 rows gives each
    warp rows of its own; smaller ones share them, which costs barriers, and are taken where registers run out.
    """
    size, is_windowed = shape.head_size, shape.window > 0
    has_matrix_units = architecture in (90, 100)  # products of a warp group or of tensor memory: fewer registers
    if shape.dtype == "float32":
        return _float32_tile(size, architecture)
    if shape.kv_dtype == "float8_e4m3fn":  # decoded in registers
        return Tile(64, 32) if size <= (128 if has_matrix_units else 64) else Tile(32, 32)
    if size > 128:
        return Tile(64, 32) if has_matrix_units else Tile(32, 32, 3 if is_windowed else 2)
    is_crowded = is_windowed or (shape.softcap > 0 and architecture == 80 and 80 < size < 128)
    needs_stage = architecture == 100 and (80 < size < 128 or (size <= 64 and not is_crowded and not shape.softcap))
    return Tile(64, 32 if is_crowded else 64, 3 if needs_stage else 2)


def _float32_tile(size: int, architecture: int) -> Tile:
    """Heads of 80 spill on 8.0 and 9.0 still, those of 256 on 12.0."""
    if size <= 64:
        return Tile(32, 32)
    if size <= 80:
        return Tile(16, 16, num_warps=8)
    if size > 128 and SHARED_BYTES[architecture] < 100 * 1024:  # two stages of the in-step tile do not fit
        return Tile(16, 32, num_stages=1, num_warps=8)
    return Tile(16, 32, num_warps=4 if size > 128 or architecture == 120 else 8)


def candidates(shape: KernelShape, architecture: int) -> Iterator[KernelConfiguration]:
    """Yield the configurations that differ in how keys are cut into sections."""
    tile = largest_tile(shape, architecture)
    tile_rows = max(tile.rows, 1 << (shape.group - 1).bit_length())
    min_keys_per_row = PARTIAL_KEY_BYTES // DTYPE_BYTES[shape.kv_dtype]
    for min_section_keys in SECTION_KEYS:
        for max_sections in MAX_SECTIONS:
            yield KernelConfiguration(
                tile_rows=tile_rows,
                tile_keys=tile.keys,
                min_section_keys=min_section_keys,
                min_keys_per_row=min_keys_per_row,
                max_sections=max_sections,
                max_split_rows=MAX_SPLIT_ROWS,
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )


@lru_cache(maxsize=256)
def default_configuration(shape: KernelShape, architecture: int) -> KernelConfiguration:
    """Return the candidate that the cost model finds fastest: the sum, over ``WORKLOADS``, of times of the fastest.

    Of equals the one with fewer and longer sections.
    """
    device = DEVICES[architecture]
    found = list(candidates(shape, architecture))
    times = [[predict_us(shape, each, architecture, device, workload) for workload in WORKLOADS] for each in found]
    fastest = [min(of_workload) for of_workload in zip(*times, strict=True)]

    def rank(index: int) -> tuple[float, int, int]:
        slowdown = sum(time / best for time, best in zip(times[index], fastest, strict=True))
        return round(slowdown, 3), found[index].max_sections, -found[index].min_section_keys

    return found[min(range(len(found)), key=rank)]

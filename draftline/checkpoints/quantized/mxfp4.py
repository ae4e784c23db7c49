"""MXFP4 of gpt-oss: codes of four bits (E2M1), and a power of two for a block of 32 inputs, of all experts at once.

Source: the Microscaling formats of the Open Compute Project, and ``Mxfp4Config`` of transformers. A byte of
``NAME_blocks [experts, out, in / 32, 16]`` holds two inputs, the even one low; ``NAME_scales [experts, out, in / 32]``
holds exponents plus 127, and 255 is no number. The plain tensor is ``NAME [experts, in, out]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.float4 import VALUES
from draftline.checkpoints.quantized.layout import Layout
from draftline.checkpoints.quantized.packing import unpack_octets
from draftline.checkpoints.quantized.parts import Parts
from draftline.checkpoints.quantized.stored import CHUNK_ELEMENTS, stored_rows
from draftline.checkpoints.source_tensor import SourceTensor

BLOCKS, SCALES = "blocks", "scales"
BLOCK_INPUTS = 32
POWERS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))  # by stored exponent


def mxfp4_layout(config: JsonObject) -> Layout:
    """Return the layout; nothing in its configuration varies it."""
    return Layout(
        title=f"MXFP4, a power of two for {BLOCK_INPUTS} inputs",
        parts=frozenset((BLOCKS, SCALES)),
        unused=frozenset(),
        open_matrix=_open_matrices,
        separator="_",
        plain="",
    )


def _open_matrices(parts: Parts) -> SourceTensor:
    codes = parts.tensor(BLOCKS, ("uint8",), (None, None, None, BLOCK_INPUTS // 2))
    count, out, num_blocks, octets = codes.shape
    scales = parts.tensor(SCALES, ("uint8",), (count, out, num_blocks))
    shape = (count, num_blocks * BLOCK_INPUTS, out)
    expert_codes = replace(codes, shape=(count, out * num_blocks * octets))
    expert_scales = replace(scales, shape=(count, out * num_blocks))

    def chunks() -> Iterator[NDArray[np.float32]]:
        """Of one expert a few blocks of inputs at a time: small enough for caches, as they are transposed."""
        step = max(1, CHUNK_ELEMENTS // (out * BLOCK_INPUTS))
        for blocks, exponents in zip(stored_rows(expert_codes, 1), stored_rows(expert_scales, 1), strict=True):
            blocks, exponents = blocks.reshape(out, num_blocks, octets), exponents.reshape(out, num_blocks)
            for first in range(0, num_blocks, step):
                taken = slice(first, first + step)
                yield _inputs(blocks[:, taken], exponents[:, taken]).T.reshape(-1)

    return SourceTensor(codes.where, "float32", shape, chunks)


def _inputs(blocks: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return ``[out, 32 n]`` of ``blocks [out, n, 16]`` and ``exponents [out, n]``; exact.

    >>> _inputs(np.full((1, 1, 16), 0x42, np.uint8), np.array([[128]], np.uint8))[0, :4].tolist()
    [2.0, 4.0, 2.0, 4.0]
    """
    codes = unpack_octets(blocks.reshape(-1, BLOCK_INPUTS // 2), 4)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found where it is converted
        values: NDArray[np.float32] = VALUES[codes] * POWERS[exponents].reshape(-1, 1)
    return values.reshape(len(blocks), -1)

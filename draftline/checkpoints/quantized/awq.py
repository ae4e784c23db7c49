"""AWQ, as AutoAWQ stores it in its version ``gemm``: codes of 4 bits, outputs packed.

Source: AutoAWQ's ``WQLinear_GEMM`` and ``AwqConfig`` of transformers. A word of ``qweight [in, out / 8]`` and of
``qzeros [groups, out / 8]`` holds the codes of eight outputs, in the order of ``OUTPUTS``; zero points are stored as
they are. ``zero_point`` in the configuration says nothing that the tensors do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.gptq import SCALE_DTYPES, SCALES, WEIGHTS, ZEROS, describe_groups, group_size_of
from draftline.checkpoints.quantized.grid import Grid, matrix_tensor
from draftline.checkpoints.quantized.layout import Layout
from draftline.checkpoints.quantized.packing import unpack_words
from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_columns
from draftline.checkpoints.source_tensor import SourceTensor

BITS = 4
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's eight outputs each half-byte is for, the low one first
OLD_KEYS = {"bits": "w_bit", "group_size": "q_group_size"}  # of AutoAWQ's own quant_config.json


def awq_layout(config: JsonObject) -> Layout:
    """Read the configuration. Raises: CheckpointError where it is of another version."""
    bits_key, group_key = (old if config.get(key) is None else key for key, old in OLD_KEYS.items())
    if config.integer(bits_key) != BITS:
        raise config.error(bits_key, str(BITS), config.get(bits_key), USE_ORIGINAL)
    group_size = group_size_of(config, group_key)
    for key in ("version", "format"):
        version = config.get(key)
        if version is not None and str(version).lower() != "gemm":
            raise config.error(key, '"gemm"', version, USE_ORIGINAL)
    return Layout(
        title=f"AWQ, {BITS} bits in {describe_groups(group_size)}",
        parts=frozenset((WEIGHTS, ZEROS, SCALES)),
        unused=frozenset(),
        open_matrix=partial(_open_matrix, group_size),
    )


def _open_matrix(group_size: int, parts: Parts) -> SourceTensor:
    weights = parts.tensor(WEIGHTS, ("int32",), (None, None))
    num_inputs, num_words = weights.shape
    out, block = num_words * len(OUTPUTS), group_size or num_inputs
    num_groups = -(-num_inputs // block)
    scales = parts.tensor(SCALES, SCALE_DTYPES, (num_groups, out))
    zeros = parts.tensor(ZEROS, ("int32",), (num_groups, num_words))

    def grid() -> Grid:
        return Grid(
            np.ascontiguousarray(read_whole(scales).astype(np.float32).T),
            block_rows=1,
            block_columns=block,
            zeros=_codes_of_outputs(np.ascontiguousarray(read_whole(zeros).T)).astype(np.float32),
        )

    def code_rows() -> Iterator[NDArray[np.uint8]]:
        for words in stored_columns(weights, max(1, rows_per_chunk(num_inputs) // len(OUTPUTS))):
            yield _codes_of_outputs(words)

    return matrix_tensor(weights, (out, num_inputs), code_rows, grid)


def _codes_of_outputs(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return ``[8 n, in]``, the codes of each output, of ``words [n, in]``."""
    codes = unpack_words(words, BITS).reshape(*words.shape, len(OUTPUTS))[..., np.argsort(OUTPUTS)]
    return np.ascontiguousarray(codes.transpose(0, 2, 1)).reshape(-1, words.shape[1])

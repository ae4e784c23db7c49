"""GPTQ, as AutoGPTQ and GPTQModel store it: codes of 2, 3, 4 or 8 bits, inputs packed.

Source: the packing modules of AutoGPTQ and GPTQModel, and ``GPTQConfig`` of transformers. ``qweight [in bits / 32,
out]`` holds the codes of one output's inputs as a string of bits, ``qzeros [groups, out bits / 32]`` those of one
group's outputs. ``g_idx [in]`` says of each input which group it is of; in the order of activations (``desc_act``)
groups are scattered. Version 1 stores zero points less one. It cannot hold a zero point of 0: writers then borrowed
from the neighbour or overwrote it, and readers disagree about what stands there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.grid import Grid, matrix_tensor
from draftline.checkpoints.quantized.layout import Layout
from draftline.checkpoints.quantized.packing import WORD_BITS, num_words, unpack_words
from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts
from draftline.checkpoints.quantized.stored import read_whole, rows_per_chunk, stored_columns
from draftline.checkpoints.source_tensor import SourceTensor

BITS = (2, 3, 4, 8)
WEIGHTS, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
SCALE_DTYPES = ("float16", "bfloat16", "float32")
FORMATS = {"gptq": 1, "gptq_v2": 2}  # checkpoint_format -> version
OTHER_NETWORKS = ("adapter", "rotation")  # settings that add to the network, or turn its inputs


@dataclass(frozen=True)
class Stated:
    """What the configuration says, under keys behind ``prefix``. ``group_size`` 0: all inputs are one group.

    ``varies``: some layers have other bits and groups, which ``qzeros`` and ``g_idx`` tell.
    """

    prefix: str
    version: int
    bits: int
    group_size: int
    varies: bool


def gptq_layout(config: JsonObject) -> Layout:
    """Read the configuration. Raises: CheckpointError where it is of another version, or needs another network."""
    bits = config.integer("bits")
    if bits not in BITS:
        raise config.error("bits", f"one of {', '.join(map(str, BITS))}", bits, USE_ORIGINAL)
    group_size = group_size_of(config, "group_size")
    stated = {str(config.get(key)) for key in ("checkpoint_format", "format") if config.get(key) is not None}
    versions = {FORMATS.get(name) for name in stated or {"gptq"}}
    if len(versions) > 1 or None in versions:
        raise config.error(
            "checkpoint_format", f"one of {', '.join(FORMATS)}", " and ".join(sorted(stated)), USE_ORIGINAL
        )
    version = versions.pop()
    assert version is not None
    if config.flag("is_marlin_format", False):
        raise config.error("is_marlin_format", "false", True, USE_ORIGINAL)
    if config.get("pack_dtype") not in (None, "int32"):
        raise config.error("pack_dtype", '"int32"', config.get("pack_dtype"), USE_ORIGINAL)
    for key in OTHER_NETWORKS:
        if config.get(key):
            raise config.error(key, "absent", config.get(key), USE_ORIGINAL)
    order = ", in the order of activations" if config.flag("desc_act", False) else ""
    varies = bool(config.get("dynamic"))
    sizes = f"{bits} bits in {describe_groups(group_size)}"
    return Layout(
        title=f"GPTQ version {version}, {sizes}{order}" + (", other sizes in some layers" if varies else ""),
        parts=frozenset((WEIGHTS, ZEROS, SCALES, GROUPS)),
        unused=frozenset(),
        open_matrix=partial(_open_matrix, Stated(config.prefix, version, bits, group_size, varies)),
    )


def describe_groups(group_size: int) -> str:
    return f"groups of {group_size} inputs" if group_size else "one group"


def group_size_of(config: JsonObject, key: str) -> int:
    """Return the inputs of a group, 0 = all of them (-1 in the file)."""
    return 0 if config.get(key) == -1 else config.integer(key)


def _open_matrix(stated: Stated, parts: Parts) -> SourceTensor:
    scales = parts.tensor(SCALES, SCALE_DTYPES, (None, None))
    num_groups, out = scales.shape
    weights = parts.tensor(WEIGHTS, ("int32",), (None, out))
    zeros = parts.tensor(ZEROS, ("int32",), (num_groups, None))
    bits = _find_bits(stated, parts, out)
    num_inputs = weights.shape[0] * WORD_BITS // bits
    groups = parts.optional(GROUPS, ("int32",), (num_inputs,))
    block = stated.group_size or num_inputs
    if bits != stated.bits or num_groups != -(-num_inputs // block):
        if not stated.varies:
            rule = f"is in {describe_groups(stated.group_size)}, as {stated.prefix}group_size says"
            raise parts.error(WEIGHTS, rule, f"{num_groups} groups of {num_inputs} inputs")
        if groups is None:
            raise parts.error(WEIGHTS, f"of sizes of its own has a {GROUPS} beside it", "none")

    def grid() -> Grid:
        return Grid(
            np.ascontiguousarray(read_whole(scales).astype(np.float32).T),
            block_rows=1,
            block_columns=block,
            zeros=_zero_points(parts, zeros, bits, out, stated.version),
            groups=None if groups is None else _groups(parts, groups, num_groups, block),
        )

    def code_rows() -> Iterator[NDArray[np.uint8]]:
        for words in stored_columns(weights, rows_per_chunk(num_inputs)):
            yield unpack_words(words, bits)

    return matrix_tensor(weights, (out, num_inputs), code_rows, grid)


def _find_bits(stated: Stated, parts: Parts, out: int) -> int:
    """Return the bits that the configuration says or, where layers vary, those that the stored sizes fit first."""
    num_zero_words, num_words_of_inputs = parts.tensors[ZEROS].shape[1], parts.tensors[WEIGHTS].shape[0]
    groups = parts.tensors.get(GROUPS)
    for bits in (stated.bits, *BITS) if stated.varies else (stated.bits,):
        fits = num_words(out, bits) == num_zero_words and num_words_of_inputs * WORD_BITS % bits == 0
        if fits and (not stated.varies or groups is None or groups.shape == (num_words_of_inputs * WORD_BITS // bits,)):
            return bits
    rule = f"and {WEIGHTS} hold codes of {stated.bits} bits, as {stated.prefix}bits says, for {out} outputs"
    raise parts.error(ZEROS, rule, f"{num_zero_words} and {num_words_of_inputs} words")


def _zero_points(parts: Parts, tensor: SourceTensor, bits: int, out: int, version: int) -> NDArray[np.float32]:
    """Return ``[out, groups]``; the last word of a row may be padded."""
    stored = unpack_words(read_whole(tensor), bits)[:, :out]
    if version == 1:
        if (stored == (1 << bits) - 1).any():
            rule = "holds no zero point of 0, which version 1 of GPTQ cannot store"
            raise parts.error(ZEROS, rule, f"{(1 << bits) - 1}, which is read in several ways", "convert to gptq_v2")
        stored += 1
    return np.ascontiguousarray(stored.T.astype(np.float32))


def _groups(parts: Parts, tensor: SourceTensor, num_groups: int, block: int) -> NDArray[np.int32] | None:
    """Return the group of each input, or None where they stand side by side."""
    groups: NDArray[np.int32] = read_whole(tensor)
    if groups.min() < 0 or groups.max() >= num_groups:
        got = f"{groups.min()} to {groups.max()}"
        raise parts.error(GROUPS, f"names groups from 0 to {num_groups - 1}", got)
    return None if np.array_equal(groups, np.arange(len(groups)) // block) else groups

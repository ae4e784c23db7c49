"""What engines add to weights that were quantised before: the table of docs/targets.md, measured again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.quantization import quantize_int4_blocks, quantize_int8_blocks
from tests.tiny_packings import FLOAT4, Pack, Packed, float8_packing, gptq_packing

PAGE = (Path(__file__).parents[3] / "docs" / "targets.md").read_text(encoding="utf-8")
READ_FROM: dict[str, Pack] = {
    "not quantised": lambda weight: Packed({}, weight),
    "FP8, a scale for each block or matrix": float8_packing((128, 128)),
    "4 bits, groups of 128, symmetric": gptq_packing(group_size=128),
    "4 bits, groups of 128, with zero points": gptq_packing(group_size=128, symmetric=False),
    "4 bits, groups of 128, symmetric, in the order of activations": gptq_packing(group_size=128, act_order=True),
    "MXFP4, a power of two for 32 inputs": lambda weight: Packed({}, in_mxfp4(weight)),
}


def in_mxfp4(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to the nearest code, with the smallest power of two that lets none overflow."""
    blocks, steps = weight.reshape(-1, 32), np.array(FLOAT4, np.float32)
    powers = np.exp2(np.ceil(np.log2(np.abs(blocks).max(axis=1, keepdims=True) / steps[-1])))
    magnitudes = steps[np.searchsorted((steps[1:] + steps[:-1]) / 2, np.abs(blocks) / powers)]
    rounded: NDArray[np.float32] = (np.copysign(magnitudes, blocks) * powers).astype(np.float32)
    return rounded.reshape(weight.shape)


def in_int8(weight: NDArray[np.float32]) -> NDArray[Any]:
    codes, scales = quantize_int8_blocks(weight)
    return ((codes.astype(np.float32) - 128) * scales[..., None]).reshape(weight.shape)


def in_int4(weight: NDArray[np.float32]) -> NDArray[Any]:
    packed, scales, zeros = quantize_int4_blocks(weight)
    codes, points = (np.stack([pairs & 15, pairs >> 4], axis=-1).astype(np.float32) for pairs in (packed, zeros))
    differences = codes.reshape(*scales.shape, -1) - points.reshape(len(zeros), -1)[:, : scales.shape[1], None]
    values: NDArray[Any] = differences * scales[..., None]
    return values.reshape(weight.shape)


@pytest.mark.parametrize("name", READ_FROM)
def test_the_table(name: str) -> None:
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert row is not None
    stated = [float(cell.strip(" %") or 0) for cell in row[1].split("|")]
    weight = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    read = READ_FROM[name](weight).weights
    differences = [read - weight, in_int8(read) - read, in_int4(read) - read, in_int4(read) - weight]
    found = [100 * float(np.sqrt(np.mean(difference**2) / np.mean(weight**2))) for difference in differences]
    assert found == pytest.approx(stated, abs=0.1)

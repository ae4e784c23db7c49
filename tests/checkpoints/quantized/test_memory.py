"""Conversion of quantised checkpoints takes little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.conversion import MEASURE_MEMORY
from tests.tiny_checkpoints import random_tensors, write_tiny_checkpoint
from tests.tiny_quantized import AWQ, FP8, GPTQ, write_stored

WIDE, NUM_LAYERS = 1024, 6


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8"])
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path, name: str) -> None:
    """Nor with a matrix: what is in memory are a slab of codes, a chunk of float32, and the scales."""
    source, tiny = tmp_path / "s", write_tiny_checkpoint(tmp_path / "tiny")
    write_tiny_checkpoint(source, hidden_size=64, num_layers=1)
    config = json.loads((source / "config.json").read_text())
    sizes = {"hidden_size": WIDE, "intermediate_size": 4 * WIDE, "num_hidden_layers": NUM_LAYERS, "head_dim": WIDE // 4}
    config |= sizes
    group_size = 128
    shapes = {name: values.shape for name, values in random_tensors(config | {"num_hidden_layers": 1}, 0).items()}
    stored: dict[str, Any] = {}
    for tensor_name, shape in shapes.items():
        layers = range(NUM_LAYERS) if ".layers." in tensor_name else range(1)
        for layer in layers:
            full_name = tensor_name.replace(".0.", f".{layer}.")
            prefix = full_name.removesuffix("weight")
            if "_proj" not in full_name:
                stored[full_name] = np.zeros(shape, np.float16)
                continue
            out, size = shape
            groups = size // group_size
            if name == "fp8":
                stored[f"{prefix}weight"] = np.zeros(shape, np.uint8).view("float8_e4m3fn")
                stored[f"{prefix}weight_scale_inv"] = np.ones((out // 128, groups), np.float32)
                continue
            words = (size // 8, out) if name == "gptq" else (size, out // 8)
            stored[f"{prefix}qweight"] = np.zeros(words, np.int32)
            stored[f"{prefix}qzeros"] = np.zeros((groups, out // 8), np.int32)
            stored[f"{prefix}scales"] = np.ones((groups, out), np.float16)
    write_stored(source, stored)
    methods = {"gptq": GPTQ | {"group_size": 128}, "awq": AWQ | {"group_size": 128}}
    quantization = methods.get(name, FP8 | {"weight_block_size": [128, 128]})
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    argv = [sys.executable, "-c", MEASURE_MEMORY, *map(str, (source, tiny, tmp_path / "c", "float16"))]
    result = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    converted_bytes = (tmp_path / "c" / "rank0.safetensors").stat().st_size
    assert int(result.stdout) < 50e6 < converted_bytes / 3

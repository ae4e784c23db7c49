"""The tensors of an engine, as the build writes them, are those of the checkpoint, quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.graphs.target import EMBEDDING, LM_HEAD
from draftline.quantization import (
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)
from draftline.sessions.engine_weights import CHECKPOINT_FILE, read_engine_weights
from draftline.sessions.native_kernels import Kernels
from tests.tiny_checkpoints import write_tiny_checkpoint

INT8: dict[Kernels, tuple[Any, tuple[str, ...]]] = {
    "onnxruntime": (quantize_int8_blocks, ("int8", "scale")),
    "native": (quantize_int8_tiles, ("int8_tiles", "scale_tiles")),
}
INT4: dict[Kernels, tuple[Any, tuple[str, ...]]] = {
    "onnxruntime": (quantize_int4_blocks, ("int4", "scale", "zero")),
    "native": (quantize_int4_tiles, ("int4_tiles", "scale_tiles", "zero_tiles")),
}


def read(path: Path) -> dict[str, NDArray[Any]]:
    return {name: map_tensor(path, location) for name, location in tensor_locations(path).items()}


@pytest.fixture(scope="module", params=["float32", "float16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs are no multiple of 16, inputs none of 32."""
    directory = tmp_path_factory.mktemp("checkpoint")
    source = write_tiny_checkpoint(directory / "source", hidden_size=72, heads=3, kv_heads=1, intermediate_size=100)
    convert_checkpoint(source, directory / "converted", request.param, lambda done, total: None)
    return directory / "converted"


@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
@pytest.mark.parametrize("weights_dtype", ["int8", "int4"])
def test_matrices_are_quantised(checkpoint: Path, tmp_path: Path, weights_dtype: str, kernels: Kernels) -> None:
    outer = (EMBEDDING, LM_HEAD)
    weights = read_engine_weights(
        checkpoint, "float32", weights_dtype, kernels, outer=outer, first=(), file="w", linked_file="l"
    )
    locations = weights.write(tmp_path, lambda: None)
    stored, source = read(tmp_path / "w"), read(checkpoint / CHECKPOINT_FILE)
    assert set(stored) == set(locations)
    layer = "transformer.layers.1"
    fc_gate = np.concatenate([source[f"{layer}.mlp.{name}.weight"] for name in ("fc", "gate")])
    matrices = {
        EMBEDDING: source[f"{EMBEDDING}.weight"],
        LM_HEAD: source[f"{LM_HEAD}.weight"],
        f"{layer}.attention.qkv": source[f"{layer}.attention.qkv.weight"],
        f"{layer}.mlp.fc_gate": fc_gate,
    }
    for name, matrix in matrices.items():
        quantize, suffixes = (INT8 if name in outer or weights_dtype == "int8" else INT4)[kernels]
        for suffix, expected in zip(suffixes, quantize(matrix.astype(np.float32)), strict=True):
            np.testing.assert_array_equal(stored[f"{name}.weight_{suffix}"], expected)
            assert locations[f"{name}.weight_{suffix}"].shape == expected.shape

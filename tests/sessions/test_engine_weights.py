"""The tensors of an engine, as the build writes them, are those of the checkpoint, quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.gpu_quantization import quantize_float8
from draftline.graphs.target import EMBEDDING, LM_HEAD
from draftline.quantization import (
    quantize_int4_blocks,
    quantize_int4_tiles,
    quantize_int8_blocks,
    quantize_int8_tiles,
)
from draftline.sessions import stored_matrices
from draftline.sessions.engine_weights import CHECKPOINT_FILE, read_engine_weights
from draftline.sessions.gpu_weight_forms import FLOAT8
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


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs of an expert are no multiple of 16, inputs none of 32."""
    directory = tmp_path_factory.mktemp("mixture")
    source = write_tiny_checkpoint(
        directory / "source", "mixtral", hidden_size=72, heads=3, kv_heads=1, intermediate_size=100, num_layers=1
    )
    convert_checkpoint(source, directory / "converted", "float16", lambda done, total: None)
    return directory / "converted"


def write_mixture(mixture: Path, directory: Path, weights_dtype: str, kernels: Kernels) -> dict[str, NDArray[Any]]:
    """Write the engine's tensors; return those that graphs find, wherever they lie."""
    weights = read_engine_weights(
        mixture, "float16", weights_dtype, kernels, outer=(EMBEDDING, LM_HEAD), first=(), file="w", linked_file="l"
    )
    dtypes = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.UINT8: np.uint8}
    return {
        name: np.memmap(directory / at.file, dtypes[at.onnx_type], "r", at.offset, at.shape)
        for name, at in weights.write(directory, lambda: None).items()
    }


@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
@pytest.mark.parametrize("weights_dtype", ["float32", "int8", "int4"])
def test_experts_are_apart_or_one_wide_layer(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights_dtype: str, kernels: Kernels
) -> None:
    """The router stays as it is; the wide form is put together a few rows at a time."""
    monkeypatch.setattr(stored_matrices, "SLICE_VALUES", 3000)
    stored, source = write_mixture(mixture, tmp_path, weights_dtype, kernels), read(mixture / CHECKPOINT_FILE)
    prefix = "transformer.layers.0.mlp"
    fc, proj = (source[f"{prefix}.{name}.weight"].astype(np.float32) for name in ("fc", "proj"))
    np.testing.assert_array_equal(stored[f"{prefix}.router.weight"], source[f"{prefix}.router.weight"])
    assert stored[f"{prefix}.router.weight"].dtype == np.float32
    matrices = {"wide_fc": fc.reshape(-1, 72), "wide_proj": np.concatenate(list(proj), axis=1)}
    if kernels == "native":
        matrices = {"fc": fc, "proj": proj}
    if weights_dtype == "float32":
        for name, matrix in matrices.items():
            np.testing.assert_array_equal(stored[f"{prefix}.{name}.weight"], matrix)
        return
    quantize, suffixes = (INT8 if weights_dtype == "int8" else INT4)[kernels]
    for name, matrix in matrices.items():
        parts = quantize(matrix) if matrix.ndim == 2 else map(np.stack, zip(*map(quantize, matrix), strict=True))
        for suffix, expected in zip(suffixes, parts, strict=True):
            np.testing.assert_array_equal(stored[f"{prefix}.{name}.weight_{suffix}"], expected)


@pytest.mark.parametrize("weights_dtype", ["float16", FLOAT8])
def test_experts_of_a_gpu_are_one_wide_layer(mixture: Path, tmp_path: Path, weights_dtype: str) -> None:
    stored, source = write_mixture(mixture, tmp_path, weights_dtype, "onnxruntime"), read(mixture / CHECKPOINT_FILE)
    prefix = "transformer.layers.0.mlp"
    wide_fc = source[f"{prefix}.fc.weight"].reshape(-1, 72)
    wide_proj = np.concatenate(list(source[f"{prefix}.proj.weight"]), axis=1)
    np.testing.assert_array_equal(stored[f"{prefix}.router.weight"], source[f"{prefix}.router.weight"])
    np.testing.assert_array_equal(stored[f"{prefix}.wide_fc.weight"], wide_fc)
    own = tensor_locations(tmp_path / "w")
    if weights_dtype == "float16":
        assert list(own) == [f"{prefix}.wide_proj.weight"], "all else lies in the linked checkpoint"
        np.testing.assert_array_equal(stored[f"{prefix}.wide_proj.weight"], wide_proj)
        return
    assert not any("router" in name for name in own)
    for name, matrix in (("wide_fc", wide_fc), ("wide_proj", wide_proj)):
        for suffix, expected in zip(("float8", "scale_float8"), quantize_float8(matrix), strict=True):
            np.testing.assert_array_equal(stored[f"{prefix}.{name}.weight_{suffix}"], expected)

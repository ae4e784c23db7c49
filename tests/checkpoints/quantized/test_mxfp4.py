"""MXFP4 of gpt-oss: read exactly, converted as its plain weights are, and refused where it contradicts itself."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.layout import dequantize
from draftline.checkpoints.quantized.recognition import recognise_layout
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.show import describe_checkpoint
from draftline.checkpoints.source_tensor import SourceTensor
from tests.checkpoints.conversion import MEASURE_MEMORY
from tests.checkpoints.quantized.refusal import fails
from tests.tiny_checkpoints import random_tensors, write_tiny_checkpoint
from tests.tiny_quantized import write_stored

EXCLUDED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": EXCLUDED}
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MATRICES = ("gate_up_proj", "down_proj")
EXPERTS = "model.layers.0.mlp.experts"
Tensors = dict[str, NDArray[Any]]


def pack(plain: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Round ``[experts, in, out]`` to blocks ``[experts, out, in / 32, 16]``, their exponents, and what these are."""
    count, num_inputs, out = plain.shape
    blocks = np.zeros((count, out, num_inputs // 32, 16), np.uint8)
    exponents = np.zeros((count, out, num_inputs // 32), np.uint8)
    rounded = np.zeros_like(plain)
    for expert in range(count):
        for output in range(out):
            for block in range(num_inputs // 32):
                inputs = plain[expert, 32 * block : 32 * block + 32, output]
                exponent = math.ceil(math.log2(max(float(abs(inputs).max()), 1e-30) / 6))
                exponents[expert, output, block] = exponent + 127
                for place, value in enumerate(inputs.tolist()):
                    distances = [abs(abs(value) - magnitude * 2.0**exponent) for magnitude in MAGNITUDES]
                    code = distances.index(min(distances)) + (8 if value < 0 else 0)
                    blocks[expert, output, block, place // 2] |= code << 4 * (place % 2)
                    sign = -1.0 if value < 0 else 1.0
                    rounded[expert, 32 * block + place, output] = sign * MAGNITUDES[code % 8] * 2.0**exponent
    return blocks, exponents, rounded


def write_mxfp4(directory: Path, **options: Any) -> tuple[Tensors, Tensors]:
    """Write a checkpoint as it is published; return what is stored and what its plain tensors are."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "heads": 2, "num_layers": 1} | options
    write_tiny_checkpoint(directory, "gpt_oss", **sizes)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    stored: Tensors = {}
    plain: Tensors = {}
    for name, values in random_tensors(config, 0).items():
        if name.endswith(MATRICES):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], plain[name] = pack(values)
        else:
            stored[name] = values.astype("bfloat16")
            plain[name] = stored[name].astype(np.float32)
    write_stored(directory, stored)
    path.write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return stored, plain


def test_codes_times_powers_of_two(tmp_path: Path) -> None:
    _, plain = write_mxfp4(tmp_path)
    checkpoint = open_huggingface(tmp_path, "float32")
    assert set(checkpoint.tensors) == set(plain)
    for name, expected in plain.items():
        found = checkpoint.tensors[name]
        assert found.shape == expected.shape
        np.testing.assert_array_equal(read_whole(found).astype(np.float32), expected, name)
    assert checkpoint.notes[0] == "quantised: MXFP4, a power of two for 32 inputs; 2 matrices"


def tensor(values: NDArray[Any]) -> SourceTensor:
    return SourceTensor(Path("file"), values.dtype.name, values.shape, lambda: iter([values.reshape(-1)]))


def read(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    stored = {"experts.down_proj_blocks": tensor(blocks), "experts.down_proj_scales": tensor(scales)}
    plain, _ = dequantize(recognise_layout(JsonObject(Path("config.json"), MXFP4)), stored, "folder", ())
    found = plain["experts.down_proj"]
    values: NDArray[np.float32] = np.concatenate([chunk.copy() for chunk in found.chunks()]).reshape(found.shape)
    return values


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_all_codes_are_what_transformers_reads(count: int, out: int, num_blocks: int, seed: int) -> None:
    torch = pytest.importorskip("torch")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, out, num_blocks, 16), np.uint8)
    scales = random.integers(1, 252, (count, out, num_blocks), np.uint8)
    expected = convert(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    np.testing.assert_array_equal(read(blocks, scales), expected)


def test_the_smallest_and_the_largest_exponent() -> None:
    blocks = np.full((1, 1, 1, 16), 0x11, np.uint8)  # 0.5
    assert read(blocks, np.array([[[0]]], np.uint8))[0, 0, 0] == 2.0**-128
    assert read(blocks, np.array([[[254]]], np.uint8))[0, 0, 0] == 2.0**126
    assert np.isnan(read(blocks, np.array([[[255]]], np.uint8))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_converted_are_the_plain_weights(tmp_path: Path, dtype: str) -> None:
    _, plain = write_mxfp4(tmp_path / "q")
    write_mxfp4(tmp_path / "p")
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "p" / "config.json").write_text(json.dumps(config))
    write_stored(tmp_path / "p", {name: values.astype("bfloat16") for name, values in plain.items()})
    for source in "qp":
        convert_checkpoint(tmp_path / source, tmp_path / f"{source}-c", dtype, lambda done, total: None)
    for file in ("rank0.safetensors", "config.json"):
        assert (tmp_path / "q-c" / file).read_bytes() == (tmp_path / "p-c" / file).read_bytes()


def test_rows_take_turns_in_the_source_alone(tmp_path: Path) -> None:
    """Up above gate, as every mixture's experts are converted."""
    _, plain = write_mxfp4(tmp_path / "q")
    convert_checkpoint(tmp_path / "q", tmp_path / "c", "float32", lambda done, total: None)
    path = tmp_path / "c" / "rank0.safetensors"
    converted = {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}
    both, biases = plain[f"{EXPERTS}.gate_up_proj"], plain[f"{EXPERTS}.gate_up_proj_bias"]
    prefix = "transformer.layers.0.mlp"
    for expert in range(4):
        for row in range(32):
            for kind, above in ((1, 0), (0, 32)):
                source = both[expert, :, 2 * row + kind]
                np.testing.assert_array_equal(converted[f"{prefix}.fc.weight"][expert, above + row], source)
                assert converted[f"{prefix}.fc.bias"][expert, above + row] == biases[expert, 2 * row + kind]
        down = plain[f"{EXPERTS}.down_proj"][expert].T
        np.testing.assert_array_equal(converted[f"{prefix}.proj.weight"][expert], down)
    np.testing.assert_array_equal(converted[f"{prefix}.proj.bias"], plain[f"{EXPERTS}.down_proj_bias"])
    np.testing.assert_array_equal(converted[f"{prefix}.router.bias"], plain["model.layers.0.mlp.router.bias"])


def put(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


BROKEN: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no scales": (
        lambda tensors: tensors.__delitem__(f"{EXPERTS}.down_proj_scales"),
        f"{EXPERTS}.down_proj has a tensor scales; got only blocks; fetch the checkpoint again",
    ),
    "scales of other blocks": (
        put(f"{EXPERTS}.down_proj_scales", lambda scales: scales[:, :-1]),
        rf"{EXPERTS}.down_proj_scales has shape \[4, 32, 1\]; got \[4, 31, 1\]",
    ),
    "blocks of another size": (
        put(f"{EXPERTS}.gate_up_proj_blocks", lambda blocks: blocks[..., :8]),
        rf"{EXPERTS}.gate_up_proj_blocks has shape \[any, any, any, 16\]",
    ),
    "signed codes": (
        put(f"{EXPERTS}.gate_up_proj_blocks", lambda blocks: blocks.view(np.int8)),
        f"{EXPERTS}.gate_up_proj_blocks is of dtype uint8; got int8",
    ),
    "an expert less": (
        lambda tensors: tensors.update({name: tensors[name][:3] for name in tensors if "down_proj_" in name}),
        rf"tensor {EXPERTS}.down_proj has shape \[4, 32, 32\]; got \[3, 32, 32\]",
    ),
    "an exponent of no number": (
        put(f"{EXPERTS}.down_proj_scales", lambda scales: np.full_like(scales, 255)),
        f"{EXPERTS}.down_proj is finite; got NaN",
    ),
    "plain beside codes": (
        lambda tensors: tensors.update({f"{EXPERTS}.down_proj": np.zeros((4, 32, 32), np.float32)}),
        f"{EXPERTS}.down_proj is stored in one layout",
    ),
    "no sinks": (
        lambda tensors: tensors.__delitem__("model.layers.0.self_attn.sinks"),
        "without model.layers.0.self_attn.sinks",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_contradictions_are_refused(tmp_path: Path, case: str) -> None:
    change, rule = BROKEN[case]
    stored, _ = write_mxfp4(tmp_path / "s")
    change(stored)
    write_stored(tmp_path / "s", stored)
    fails(tmp_path / "s", rule)


def test_layers_that_are_left_out_are_plain(tmp_path: Path) -> None:
    """As those of all patterns are; the experts' module may be named among them, and is stored as it says."""
    write_mxfp4(tmp_path / "s")
    path = tmp_path / "s" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"modules_to_not_convert": [EXPERTS]}
    path.write_text(json.dumps(config))
    fails(tmp_path / "s", f"leaves out of quantisation are stored plain; got {EXPERTS} in codes")


def test_show_says_what_it_is(tmp_path: Path) -> None:
    write_mxfp4(tmp_path)
    text = "\n".join(describe_checkpoint(str(tmp_path), None))
    assert "GptOssForCausalLM: 1 layers" in text
    assert "experts: 4 in a layer, 32 wide, 2 for a token" in text
    assert "quantised: MXFP4, a power of two for 32 inputs; 2 matrices" in text
    assert "gates clamped at 1" in text


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """Nor with a layer: what is in memory is an expert."""
    tiny, source = write_tiny_checkpoint(tmp_path / "tiny", "gpt_oss"), tmp_path / "s"
    write_tiny_checkpoint(source, "gpt_oss", num_layers=1)
    config = json.loads((source / "config.json").read_text())
    size, layers, count = 512, 3, 32
    config |= {"hidden_size": size, "intermediate_size": size, "head_dim": size // 4, "num_hidden_layers": layers}
    config |= {"num_local_experts": count, "quantization_config": MXFP4}
    stored: Tensors = {}
    for name, values in random_tensors(config | {"num_local_experts": 1}, 0).items():
        of_all = values if "experts" not in name else np.broadcast_to(values, (count, *values.shape[1:]))
        if name.endswith(MATRICES):
            shape = (count, values.shape[2], values.shape[1] // 32)
            stored[f"{name}_blocks"] = np.full((*shape, 16), 0x21, np.uint8)
            stored[f"{name}_scales"] = np.full(shape, 120, np.uint8)
        else:
            rows = (count, *values.shape[1:])
            stored[name] = np.zeros(rows, "bfloat16") if ".router." in name else of_all.astype("bfloat16")
    write_stored(source, stored)
    (source / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, "-c", MEASURE_MEMORY, *map(str, (source, tiny, tmp_path / "c", "bfloat16"))]
    result = subprocess.run(argv, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    converted_bytes = (tmp_path / "c" / "rank0.safetensors").stat().st_size
    assert int(result.stdout) < 40e6 < converted_bytes / 3

"""Conversion of quantised checkpoints: the same files as of the plain weights and the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.drafts.medusa import read_medusa
from draftline.checkpoints.huggingface import open_huggingface
from draftline.checkpoints.llmapi import check_published
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.show import describe_checkpoint
from draftline.errors import CheckpointError
from tests.sessions.tiny_engines import Text, build_tiny_engine, open_tiny_session, run_text
from tests.tiny_checkpoints import Architecture, random_tensors, write_tiny_checkpoint, write_weights
from tests.tiny_packings import Pack, float8_packing, gptq_packing
from tests.tiny_quantized import FP8, GPTQ, LAYOUTS, Layout, compressed, modelopt, write_quantized, write_stored

TOLERANCE = 1e-4  # as in tests/sessions/test_parity.py


def write_plain(directory: Path, source: Path, plain: dict[str, Any]) -> Path:
    """Write ``plain`` with the configuration of ``source``, without a word about quantisation."""
    write_tiny_checkpoint(directory)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    write_weights(directory, plain, "float32")
    return directory


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("gptq-act-order", "llama"),
        ("awq", "phi3"),
        ("fp8-blocks", "gemma3"),
        ("fp8-blocks", "qwen3_moe"),
        ("compressed-packed-asymmetric", "qwen2"),
        ("modelopt-awq", "gemma2"),
    ],
)
def test_what_is_converted_are_the_plain_weights(tmp_path: Path, name: str, architecture: Architecture) -> None:
    source = tmp_path / "s"
    plain = write_plain(tmp_path / "plain", source, write_quantized(source, LAYOUTS[name], architecture=architecture))
    for dtype in ("float32", "float16", "bfloat16"):
        for origin, converted in ((source, "q"), (plain, "p")):
            convert_checkpoint(origin, tmp_path / converted, dtype, lambda done, total: None)
        for file in ("rank0.safetensors", "config.json"):
            assert (tmp_path / "q" / file).read_bytes() == (tmp_path / "p" / file).read_bytes()


@pytest.mark.parametrize(("name", "architecture"), [("gptq-act-order", "qwen3"), ("modelopt-awq", "llama")])
def test_logits_are_those_of_transformers_with_the_plain_weights(tmp_path: Path, name: str, architecture: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    source = tmp_path / "s"
    weights = write_quantized(source, LAYOUTS[name], architecture=architecture)
    plain = write_plain(tmp_path / "plain", source, weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = np.random.default_rng(0).integers(3, 300, 20).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    session = open_tiny_session(build_tiny_engine(tmp_path, source))
    found = run_text(session, Text(list(range(8))), ids)
    session.close()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_float8_blocks_are_what_transformers_reads(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    layout = Layout(float8_packing((32, 32), "weight_scale_inv"), FP8 | {"weight_block_size": [32, 32]}, "FP8")
    write_quantized(tmp_path, layout)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    )
    ours = open_huggingface(tmp_path, "float32").tensors
    for name, theirs in model.state_dict().items():
        assert theirs.dtype == torch.float32
        np.testing.assert_array_equal(read_whole(ours[name]).astype(np.float32), theirs.numpy(), name)


def test_a_torch_file_is_read_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    for name in ("gptq", "fp8-static"):
        directory = tmp_path / name
        plain = write_quantized(directory, LAYOUTS[name], num_layers=1)
        torch.save(load(directory / "model.safetensors"), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
        ours = open_huggingface(directory, "float32").tensors
        for tensor_name, expected in plain.items():
            np.testing.assert_array_equal(read_whole(ours[tensor_name]).astype(np.float32), expected)


def test_matrices_of_several_algorithms(tmp_path: Path) -> None:
    """In one of ModelOpt's mixtures the configuration says which layer is of which."""
    by_layer = {"self_attn": LAYOUTS["modelopt-fp8"], "mlp": LAYOUTS["modelopt-awq"]}
    plain: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    listed: dict[str, Any] = {}
    write_tiny_checkpoint(tmp_path)
    for name, values in random_tensors(json.loads((tmp_path / "config.json").read_text()), 0).items():
        kind = next((kind for kind in by_layer if f".{kind}." in name), None)
        if kind is None:
            plain[name] = stored[name] = values
            continue
        packed = by_layer[kind].pack(values)
        plain[name] = packed.weights
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.{key}": part for key, part in packed.parts.items()}
        listed[layer] = {"quant_algo": "FP8"} if kind == "self_attn" else {"quant_algo": "W4A16_AWQ", "group_size": 32}
    write_stored(tmp_path, stored)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(modelopt("MIXED_PRECISION", quantized_layers=listed)))
    checkpoint = open_huggingface(tmp_path, "float32")
    for name, expected in plain.items():
        np.testing.assert_array_equal(read_whole(checkpoint.tensors[name]), expected)
    assert checkpoint.notes[0] == (
        "quantised: ModelOpt, FP8 (E4M3), a scale for each matrix and int4 of AWQ in groups of 32 inputs; 14 matrices"
    )


def test_layers_of_other_sizes_in_one_checkpoint_of_gptq(tmp_path: Path) -> None:
    sizes = {"q_proj": gptq_packing(8, 16), "down_proj": gptq_packing(2, -1)}

    class Varying:
        def __init__(self) -> None:
            self.num_calls = 0

        def __call__(self, weight: Any) -> Any:
            name = ("q_proj", "k", "v", "o", "gate", "up", "down_proj")[self.num_calls % 7]
            self.num_calls += 1
            return sizes.get(name, gptq_packing())(weight)

    rules = {r"+:.*\.q_proj.*": {"bits": 8, "group_size": 16}, r"+:.*\.down_proj.*": {"bits": 2, "group_size": -1}}
    layout = Layout(Varying(), GPTQ | {"dynamic": rules}, "GPTQ version 1")
    plain = write_quantized(tmp_path, layout)
    checkpoint = open_huggingface(tmp_path, "float32")
    for name, expected in plain.items():
        np.testing.assert_array_equal(read_whole(checkpoint.tensors[name]).astype(np.float32), expected)
    assert "other sizes in some layers" in checkpoint.notes[0]


def test_biases_of_zeros_are_left_out_and_others_stay(tmp_path: Path) -> None:
    def with_bias(pack: Pack, value: float) -> Pack:
        def packed(weight: Any) -> Any:
            found = pack(weight)
            return found._replace(parts=found.parts | {"bias": np.full(len(weight), value, np.float16)})

        return packed

    plain = write_quantized(tmp_path / "zeros", Layout(with_bias(gptq_packing(), 0.0), GPTQ, ""))
    checkpoint = open_huggingface(tmp_path / "zeros", "float32")
    assert set(checkpoint.tensors) == set(plain)
    assert "14 bias of zeros" in "\n".join(checkpoint.notes)
    write_quantized(
        tmp_path / "wanted", Layout(with_bias(gptq_packing(), 0.0), GPTQ, ""), extra_config={"mlp_bias": True}
    )
    names = open_huggingface(tmp_path / "wanted", "float32").tensors
    assert "model.layers.1.mlp.up_proj.bias" in names
    assert "model.layers.1.self_attn.q_proj.bias" not in names


def test_medusa_heads_inside_a_quantised_model(tmp_path: Path) -> None:
    """They are read where they are plain, and refused where they are not."""
    source = tmp_path / "s"
    write_quantized(source, LAYOUTS["modelopt-fp8"])
    path = source / "model.safetensors"
    tensors = {name: np.array(map_tensor(path, location)) for name, location in tensor_locations(path).items()}
    block = "medusa_heads.0.0.linear"
    tensors |= {f"{block}.weight": np.eye(64, dtype=np.float32), f"{block}.bias": np.zeros(64, np.float32)}
    write_stored(source, tensors)
    target = open_huggingface(source, "float32").config
    assert read_medusa(source, target, "float32").config.num_heads == 1
    packed = LAYOUTS["modelopt-fp8"].pack(np.eye(64, dtype=np.float32)).parts
    write_stored(source, tensors | {f"{block}.{key}": part for key, part in packed.items()})
    with pytest.raises(CheckpointError, match=f"Medusa heads are not quantised; got {block} in codes; use the heads"):
        read_medusa(source, target, "float32")


@pytest.mark.parametrize(
    ("sizes", "shape"), [({}, ()), ({"group_size": -1}, (64, 1)), ({"group_size": 32, "strategy": "group"}, (64, 2))]
)
def test_what_a_configuration_leaves_to_its_group_size(
    tmp_path: Path, sizes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    quantization = compressed("float-quantized", "float", 8, "")
    quantization["config_groups"]["group_0"]["weights"] |= sizes
    block = {(): (0, 0), (64, 1): (1, 0), (64, 2): (1, 32)}[shape]
    plain = write_quantized(tmp_path, Layout(float8_packing(block), quantization, ""), num_layers=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_array_equal(read_whole(open_huggingface(tmp_path, "float32").tensors[name]), plain[name])


def test_what_is_said(tmp_path: Path) -> None:
    write_quantized(tmp_path, LAYOUTS["modelopt-fp8"])
    lines = list(describe_checkpoint(str(tmp_path), None))
    assert lines[2:6] == [
        "quantised: ModelOpt, FP8 (E4M3), a scale for each matrix; 14 matrices",
        "each weight is read as its code times its scale, in float32, then rounded to target.dtype, and in the engine "
        "to the grid of engine.weights_dtype",
        "left out, as draftline computes without them: 14 input_scale",
        "keys and values were to be quantised, too: here kv_cache.dtype decides that",
    ]


def test_llmapi_leaves_layouts_to_tensorrt_llm_that_it_alone_reads(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = tmp_path / "s"
    write_quantized(source, LAYOUTS["modelopt-nvfp4"])
    (source / "hf_quant_config.json").write_text(json.dumps(modelopt("W4A8_MXFP4_FP8", group_size=32)))
    assert check_published(source, None, None, "float16", tmp_path / "out").hidden_size == 64
    with pytest.raises(CheckpointError, match="llmapi"):
        open_huggingface(source, "float16")
    blocks = tmp_path / "blocks"
    write_quantized(blocks, LAYOUTS["fp8-blocks"])
    with pytest.raises(CheckpointError, match=r"with weight_block_size \[128, 128\]; got \[32, 48\]"):
        check_published(blocks, None, None, "float16", tmp_path / "out")

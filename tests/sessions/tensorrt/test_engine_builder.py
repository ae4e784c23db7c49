"""Engine directories of TensorRT-RTX, built without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.errors import ArtifactError, BuildError
from draftline.gpu_quantization import quantize_float8
from draftline.sessions.engine_config import DraftMethod, EngineConfig, PoolScales, load_engine_config
from draftline.sessions.opening import check_openable, open_session
from draftline.sessions.tensorrt import engine_builder
from draftline.sessions.tensorrt.cuda_driver import load_driver
from draftline.sessions.tensorrt.emission import kernel_shapes
from draftline.sessions.tensorrt.engine_builder import PlanSettings, build_tensorrt_engine
from draftline.sessions.tensorrt.loading import check_loadable, load_plan, read_weight_locations
from draftline.sessions.tensorrt.plugin_kernels import compile_plugin_kernels
from draftline.sessions.tensorrt.vendor import Vendor
from tests.sessions.tensorrt.fake_engines import fake_commit
from tests.sessions.tensorrt.plans import LIMITS, TREE, TREE_LIMITS, convert_tiny, fake_kernels, rtx
from tests.tiny_checkpoints import Architecture


def build(
    directory: Path,
    weights: str = "embedded",
    methods: tuple[DraftMethod, ...] = (),
    weights_dtype: str = "float16",
    architectures: tuple[int, ...] = (80,),
    pool_scales: PoolScales = (),
    architecture: Architecture = "llama",
) -> Path:
    converted, drafts = convert_tiny(directory, architecture, "float16", methods)
    engine = directory / "engine"
    engine.mkdir()
    build_tensorrt_engine(
        rtx(),
        converted,
        engine,
        settings=PlanSettings(
            dtype="float16",
            weights_dtype=weights_dtype,
            pool_dtype="float8_e4m3fn" if pool_scales else "float16",
            pool_scales=pool_scales,
            weights=weights,  # type: ignore[arg-type]
            architectures=architectures,
            kernel_cache=directory / "kernels",
            timing_cache=directory / "timing.cache",
        ),
        limits=TREE_LIMITS if drafts else LIMITS,
        prefix_cache=True,
        progress=lambda done, total: None,
        drafts=drafts,
        tree=TREE if drafts else None,
    )
    return engine


@pytest.fixture
def _fast_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler: kernels are of the right shape, and do nothing."""
    monkeypatch.setattr(
        engine_builder, "compile_plugin_kernels", lambda shape, architectures, cache: fake_kernels(shape, architectures)
    )
    monkeypatch.setattr(
        engine_builder, "compile_commit_kernels", lambda shape, architectures, cache: fake_commit(shape, architectures)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine without drafts, with real kernels."""
    return build(tmp_path_factory.mktemp("plain"))


def test_a_plan_holds_weights_and_real_kernels(plain: Path) -> None:
    config = load_engine_config(plain)
    assert config.tensorrt is not None
    (facts,) = config.tensorrt.plans
    (shape,) = kernel_shapes(config.model, config.block_size, "float16", "float16")
    kernels = compile_plugin_kernels(shape, (80,), plain.parent / "kernels")
    plan = (plain / facts.file).read_bytes()
    assert facts.kernels_sha256 == (kernels.sha256,)
    assert all(kernel.cubin.startswith(b"\x7fELF") and kernel.cubin in plan for kernel in kernels.compiled)
    checkpoint = plain.parent / "converted" / "rank0.safetensors"
    embedding = map_tensor(checkpoint, tensor_locations(checkpoint)["transformer.vocab_embedding.weight"])
    assert embedding.tobytes() in plan
    assert sorted(path.name for path in plain.iterdir()) == [
        *("build.log", "config.json", "model.kernels", "model.plan", "tokenizer.json", "tokenizer_config.json")
    ]


def test_config_says_how_it_was_built(plain: Path) -> None:
    config = load_engine_config(plain)
    assert (config.backend, config.kernels, config.weights_dtype) == ("tensorrt_rtx", "plugin", "float16")
    facts = config.tensorrt
    assert facts is not None
    assert (facts.vendor_version, facts.dtype, facts.weights) == (rtx().version, "float16", "embedded")
    assert facts.compute_capabilities == (80,)
    assert facts.plans[0].profiles["prefill"]["T"] == (1, 64, 64)
    assert check_loadable(rtx(), plain, config) == facts
    log = (plain / "build.log").read_text()
    assert "model: TensorRT-RTX" in log
    assert "[info]" in log


@pytest.mark.usefixtures("_fast_kernels")
def test_external_weights_lie_beside_the_plans(tmp_path: Path) -> None:
    engine = build(tmp_path, "external", ("eagle3", "medusa"))
    config = load_engine_config(engine)
    assert config.tensorrt is not None
    assert [plan.file for plan in config.tensorrt.plans] == ["model.plan", "draft-0.plan"]
    for plan in config.tensorrt.plans:
        locations = read_weight_locations(engine, plan)
        for location in locations.values():
            assert (engine / location.file).stat().st_size >= location.offset + location.num_bytes
        assert "rotary.cosines" in locations
    target, drafter = (read_weight_locations(engine, plan) for plan in config.tensorrt.plans)
    both = target["transformer.layers.1.mlp.fc_gate.weight"]
    stored = np.fromfile(engine / both.file, np.float16, int(np.prod(both.shape)), offset=both.offset)
    source = tmp_path / "converted" / "rank0.safetensors"
    tensors = tensor_locations(source)
    parts = [map_tensor(source, tensors[f"transformer.layers.1.mlp.{name}.weight"]) for name in ("fc", "gate")]
    assert np.array_equal(stored.reshape(both.shape), np.concatenate(parts))
    assert drafter["vocab_embedding.weight"] == target["transformer.vocab_embedding.weight"], "borrowed"
    embedding = target["transformer.vocab_embedding.weight"]
    values = np.fromfile(engine / embedding.file, np.uint8, embedding.num_bytes, offset=embedding.offset).tobytes()
    assert all(values not in (engine / plan.file).read_bytes() for plan in config.tensorrt.plans)


@pytest.mark.usefixtures("_fast_kernels")
def test_experts_are_bound_where_they_lie_but_what_stands_side_by_side(tmp_path: Path) -> None:
    """Matrices above another are those of the linked checkpoint."""
    engine = build(tmp_path, "external", ("draft_model",), architecture="mixtral")
    config = load_engine_config(engine)
    assert config.model.experts is not None
    assert config.tensorrt is not None
    prefix = "transformer.layers.1.mlp"
    for plan, file in zip(config.tensorrt.plans, ("rank0.safetensors", "draft-0-rank0.safetensors"), strict=True):
        locations = read_weight_locations(engine, plan)
        for name, location in locations.items():
            assert (location.file == file) == ("wide_proj" not in name and "rotary" not in name)
        if f"{prefix}.wide_fc.weight" in locations:
            tensors = tensor_locations(engine / file)
            fc = locations[f"{prefix}.wide_fc.weight"]
            assert fc.offset == tensors[f"{prefix}.fc.weight"].byte_offset
            assert fc.shape == (4 * 2 * 128, 64)
            assert locations[f"{prefix}.wide_proj.weight"].shape == (64, 4 * 128)


@pytest.mark.usefixtures("_fast_kernels")
def test_int4_codes_are_in_the_plan_in_the_place_of_matrices(tmp_path: Path) -> None:
    engine = build(tmp_path, weights_dtype="int4")
    assert load_engine_config(engine).weights_dtype == "int4"
    source, plan = tmp_path / "converted" / "rank0.safetensors", (engine / "model.plan").read_bytes()
    tensors = tensor_locations(source)
    matrix = map_tensor(source, tensors["transformer.layers.0.attention.qkv.weight"])
    assert matrix.tobytes() not in plan
    assert map_tensor(source, tensors["transformer.vocab_embedding.weight"]).tobytes() in plan


@pytest.mark.usefixtures("_fast_kernels")
@pytest.mark.parametrize("weights", ["embedded", "external"])
def test_float8_weights_are_built_for_89_and_up(tmp_path: Path, weights: str) -> None:
    engine = build(tmp_path, weights, ("eagle3",), "float8", (89, 120))
    config = load_engine_config(engine)
    assert config.tensorrt is not None
    source, plan = tmp_path / "converted" / "rank0.safetensors", (engine / "model.plan").read_bytes()
    matrix = map_tensor(source, tensor_locations(source)["transformer.layers.0.attention.qkv.weight"])
    assert matrix.tobytes() not in plan
    if weights == "external":
        location = read_weight_locations(engine, config.tensorrt.plans[0])[
            "transformer.layers.0.attention.qkv.weight_float8"
        ]
        codes = np.fromfile(engine / location.file, np.uint8, location.num_bytes, offset=location.offset)
        assert location.onnx_type == TensorProto.FLOAT8E4M3FN
        np.testing.assert_array_equal(codes.reshape(location.shape), quantize_float8(matrix)[0])


@pytest.mark.usefixtures("_fast_kernels")
def test_float8_weights_are_not_built_for_80(tmp_path: Path) -> None:
    """The rule of engine.compute_capabilities refuses it before; this is why."""
    with pytest.raises(BuildError, match=r"builds the network; got .*target\(s\) sm80, .*fp8_e4m3.*; see build.log"):
        build(tmp_path, weights_dtype="float8")


@pytest.mark.usefixtures("_fast_kernels")
def test_a_float8_pool_is_built_for_every_gpu(tmp_path: Path) -> None:
    """Its tensor is int8 to the vendor; pools of drafters keep the network's dtype."""
    scales = ((0.25, 0.5), (2.0, 0.125))
    engine = build(tmp_path, methods=("eagle3",), architectures=(80, 120), pool_scales=scales)
    config = load_engine_config(engine)
    assert config.tensorrt is not None
    assert config.pool_dtype == "float8_e4m3fn"
    assert [(plan.pool_dtype, plan.pool_scales) for plan in config.tensorrt.plans] == [
        ("float8_e4m3fn", scales),
        ("float16", ()),
    ]


@pytest.mark.usefixtures("_fast_kernels")
def test_a_checkpoint_of_another_dtype_is_refused(tmp_path: Path) -> None:
    converted, _ = convert_tiny(tmp_path, "llama", "bfloat16")
    (tmp_path / "engine").mkdir()
    files = tmp_path / "kernels", tmp_path / "cache"
    settings = PlanSettings("float16", "float16", "float16", "embedded", (80,), *files)
    with pytest.raises(BuildError, match=r"target: .* the network's dtype, float16; got bfloat16; set target.dtype"):
        build_tensorrt_engine(
            rtx(),
            converted,
            tmp_path / "engine",
            settings=settings,
            limits=LIMITS,
            prefix_cache=True,
            progress=lambda done, total: None,
        )


def test_a_mismatch_is_refused_by_name(plain: Path) -> None:
    config = load_engine_config(plain)
    assert config.tensorrt is not None
    facts = config.tensorrt

    def refused(match: str, other: EngineConfig, vendor: Vendor | None = None) -> None:
        with pytest.raises(ArtifactError, match=match):
            check_loadable(vendor or rtx(), plain, other)

    refused(
        r"vendor_version: TensorRT-RTX loads .*; got 1\.6\.0; .*or install tensorrt-rtx-cu13==1\.6\.0",
        replace(config, tensorrt=replace(facts, vendor_version="1.6.0")),
    )
    refused("plugin_sha256: .*; got abc; ", replace(config, tensorrt=replace(facts, plugin_sha256="abc")))
    refused("backend: is tensorrt_rtx; got onnxruntime; ", replace(config, backend="onnxruntime", tensorrt=None))
    other_plan = replace(facts.plans[0], kernels_sha256=("ab" * 32,))
    refused(
        "model.plan: holds the kernels abababababab; got a plan without them",
        replace(config, tensorrt=replace(facts, plans=(other_plan,))),
    )


def test_a_changed_config_is_refused(tmp_path: Path, plain: Path) -> None:
    document = json.loads((plain / "config.json").read_text())
    document["tensorrt"]["plans"][0]["extra"] = 1
    (tmp_path / "config.json").write_text(json.dumps(document))
    for name in document["file_bytes"]:
        (tmp_path / name).symlink_to(plain / name)
    with pytest.raises(ArtifactError, match=r"tensorrt\.plans\[0\]: .*unexpected \['extra'\]"):
        load_engine_config(tmp_path)


@pytest.mark.skipif(load_driver() is not None, reason="says what a machine without a GPU says")
def test_without_a_gpu_a_plan_does_not_load(plain: Path) -> None:
    config = load_engine_config(plain)
    assert config.tensorrt is not None
    with pytest.raises(ArtifactError, match=r"model.plan: loads on a GPU that it was built for; got .*; "):
        load_plan(rtx(), plain, config.tensorrt.plans[0])


@pytest.mark.skipif(load_driver() is not None, reason="says what a machine without a GPU says")
def test_without_a_gpu_an_engine_does_not_open(plain: Path) -> None:
    for refuse in (open_session, check_openable):
        with pytest.raises(ArtifactError, match=r"engine: runs on a GPU; got none; serve it where there is one"):
            refuse(plain, load_engine_config(plain))

"""Stages of a pipeline for TensorRT-RTX, on a machine without a GPU."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from draftline.config import Pipeline
from draftline.errors import ArtifactError, BuildError, MissingPackageError
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.tensorrt import device_engine, engine_builder
from draftline.stages import gpu
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.triton.server import serve
from tests.sessions.tensorrt.fake_engines import fake_commit
from tests.sessions.tensorrt.plans import fake_kernels
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle3


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_tiny_eagle3(root / "head", write_tiny_checkpoint(root / "model"))
    return root


@pytest.fixture(autouse=True)
def _fast_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler: kernels are of the right shape, and do nothing."""
    monkeypatch.setattr(
        engine_builder, "compile_plugin_kernels", lambda shape, architectures, cache: fake_kernels(shape, architectures)
    )
    monkeypatch.setattr(
        engine_builder, "compile_commit_kernels", lambda shape, architectures, cache: fake_commit(shape, architectures)
    )


def pipeline(check: str = "auto", perplexity: str = "never", **engine: object) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model", "dtype": "float16"},
            "draft": {"method": "eagle3", "checkpoint": "head"},
            "tree": {"kind": "dynamic", "max_nodes": 8, "max_depth": 3, "top_k": 2},
            "engine": {"backend": "tensorrt_rtx", "weights_dtype": "float16", "max_seq_len": 256, "max_num_tokens": 32}
            | engine,
            "kv_cache": {"max_blocks": 64, "dtype": "float16"},
            "check": {"network": check, "perplexity": perplexity},
        }
    )


def test_target_and_drafter_are_checked_and_built(root: Path, tmp_path: Path) -> None:
    stream = io.StringIO()
    made = pipeline(compute_capabilities=(86,), perplexity="always")
    run_pipeline(made, tmp_path / "build", root=root, until="build", progress=Progress(stream))
    said = stream.getvalue()
    report = json.loads((tmp_path / "build" / "check" / "report.json").read_text())
    assert [entry["graph"] for entry in report["network"]] == ["model", "draft-0"]
    assert [entry["num_plugins"] for entry in report["network"]] == [2, 1]
    assert "check: network of draft-0: " in said
    assert report["perplexity"]["float32"] is None, "measured in float32, on the CPU"
    engine = tmp_path / "build" / "engine"
    config = load_engine_config(engine)
    assert config.tensorrt is not None
    assert config.tensorrt.compute_capabilities == (86,)
    assert [plan.file for plan in config.tensorrt.plans] == ["model.plan", "draft-0.plan"]
    assert "build: TensorRT-RTX 1.7" in said
    assert not list(engine.glob("*.safetensors"))
    again = run_pipeline(made, tmp_path / "build", root=root, until="build")
    assert [entry.reason for entry in again] == [None] * 3
    other = pipeline(compute_capabilities=(86,), weights="external")
    reasons = [
        entry.reason for entry in run_pipeline(other, tmp_path / "build", root=root, until="build", dry_run=True)
    ]
    assert reasons[2] is not None
    assert "engine.weights" in reasons[2]


@pytest.mark.parametrize("until", ["smoke", None])
def test_what_needs_a_gpu_is_refused_before_work(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str | None
) -> None:
    monkeypatch.setattr(device_engine, "load_driver", lambda: None)
    with pytest.raises(ArtifactError, match=r"tiny: stage smoke: runs on a GPU; got none; .*engine.backend=onnx"):
        run_pipeline(pipeline(), tmp_path / "build", root=root, until=until)
    assert not (tmp_path / "build").exists()


def test_engines_are_packaged_without_a_gpu_and_served_with_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_engine, "load_driver", lambda: None)
    run_pipeline(pipeline("never"), tmp_path / "build", root=root, until="package")
    assert (tmp_path / "build" / "model_repository" / "ensemble" / "config.pbtxt").is_file()
    with pytest.raises(ArtifactError, match="engine: runs on a GPU; got none; serve it where there is one"):
        serve(tmp_path / "build")


def test_an_absent_package_is_named_before_work(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingPackageError, match=r"the package triton \(the language\) is installed"):
        run_pipeline(pipeline(), tmp_path / "build", root=root, until="build")
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tensorrt-cu13>=10.14'"):
        run_pipeline(pipeline(backend="tensorrt"), tmp_path / "build", root=root, until="build")
    assert not (tmp_path / "build").exists()


def test_a_gpu_that_the_vendor_does_not_build_for(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pipeline().model_copy(
        update={"engine": pipeline().engine.model_copy(update={"compute_capabilities": (90,)})}
    )
    with pytest.raises(BuildError, match=r"engine.compute_capabilities: TensorRT-RTX builds for .*; got 90; "):
        run_pipeline(hopper, tmp_path / "build", root=root, until="build")


@pytest.mark.parametrize(("check", "limit", "expected"), [("never", 10**9, 0), ("auto", 10, 1), ("auto", 10**9, 0)])
def test_large_networks_are_checked_where_it_is_asked_for(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str, limit: int, expected: int
) -> None:
    monkeypatch.setattr(gpu, "MAX_PARAMETERS", limit)
    stream = io.StringIO()
    run_pipeline(pipeline(check), tmp_path / "build", root=root, until="check", progress=Progress(stream))
    report = json.loads((tmp_path / "build" / "check" / "report.json").read_text())
    assert (report["network"] is None) == (check == "never" or limit == 10)
    assert stream.getvalue().count("check.network=always asks for it") == expected

"""The real stages, on a tiny checkpoint, up to what needs a server."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Pipeline, check_runnable
from draftline.config.schema import BLOCKS
from draftline.errors import BuildError, CheckpointError
from draftline.manifest import load_manifest
from draftline.sessions import native_kernels
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.opening import open_session
from draftline.stages.check import check_heads, check_length, num_positions
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.stages.table import STAGES
from tests.tiny_checkpoints import write_tiny_checkpoint

REPOSITORY = Path(__file__).parents[2]
WITHOUT_SERVER = [stage for stage in STAGES if stage.name != "smoke"]


def pipeline(**engine: object) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model"},
            "engine": {"max_seq_len": 256, **engine},
            "kv_cache": {"max_blocks": 64},
        }
    )


def hashes(build_directory: Path) -> dict[str, str]:
    found = {}
    for stage in WITHOUT_SERVER:
        manifest = load_manifest(build_directory / stage.directory)
        if manifest is not None:
            found[stage.name] = manifest.outputs_sha256()
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_tiny_checkpoint(root / "model")
    return root


@pytest.fixture(scope="module")
def build_directory(root: Path) -> Path:
    run_pipeline(pipeline(), root / "build", root=root, until="package")
    return root / "build"


def test_every_stage_leaves_what_the_next_one_reads(root: Path, build_directory: Path) -> None:
    for name in ("checkpoint/rank0.safetensors", "engine/model.onnx", "model_repository/ensemble/config.pbtxt"):
        assert (build_directory / name).is_file(), name
    report = json.loads((build_directory / "check" / "report.json").read_text())
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["keeps_wide_text"]
    assert report["has_chat_template"]
    reports = run_pipeline(pipeline(), build_directory, root=root, until="package")
    assert [report.reason for report in reports] == [None] * 4


@pytest.mark.parametrize(("original", "said"), [(256, "within 256 tokens"), (255, "beyond 255 tokens.* set it to 255")])
def test_check_says_which_factors_of_longrope_an_engine_has(tmp_path: Path, original: int, said: str) -> None:
    """And a pipeline with a Phi-4-mini becomes an engine."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    keys = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": original}
    write_tiny_checkpoint(tmp_path / "model", "phi3", rope_scaling=scaling, extra_config=keys)
    stream = io.StringIO()
    run_pipeline(pipeline(), tmp_path / "build", root=tmp_path, until="build", progress=Progress(stream))
    assert re.search(f"check: longrope turns by the factors of texts {said}", stream.getvalue())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weights_dtype", ["float32", "int8", "int4"])
def test_every_dtype_makes_an_engine_that_loads(root: Path, tmp_path: Path, dtype: str, weights_dtype: str) -> None:
    target = {"checkpoint": "model", "dtype": dtype}
    other = Pipeline.model_validate(pipeline(weights_dtype=weights_dtype).model_dump() | {"target": target})
    check_runnable(other)
    run_pipeline(other, tmp_path / "build", root=root, until="build")
    engine = tmp_path / "build" / "engine"
    open_session(engine, load_engine_config(engine)).close()


def put_library(monkeypatch: pytest.MonkeyPatch, path: Path | None) -> None:
    """Let this machine have a library, or none, whatever was compiled here."""
    loaded = (None, "none") if path is None else ("avx2", "")
    monkeypatch.setattr(native_kernels, "find_library", lambda: path)
    monkeypatch.setattr(native_kernels, "_load", lambda found: loaded)


def test_auto_says_where_it_falls_back_and_a_later_library_asks_for_another_build(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, stream, library = tmp_path / "build", io.StringIO(), tmp_path / "cpu_kernels.so"
    put_library(monkeypatch, None)
    run_pipeline(pipeline(), build, root=root, until="build", progress=Progress(stream))
    with pytest.raises(BuildError, match=r"engine\.kernels: native needs the compiled library; got none; install"):
        run_pipeline(pipeline(kernels="native"), tmp_path / "other", root=root, until="build")
    assert load_engine_config(build / "engine").kernels == "onnxruntime"
    said = [line for line in stream.getvalue().splitlines() if "no native CPU kernels" in line]
    assert len(said) == 1
    assert said[0].startswith("build: no native CPU kernels (none): ONNX Runtime's serve, slower; install draftline")

    library.write_bytes(b"compiled")
    put_library(monkeypatch, library)
    reason = run_pipeline(pipeline(), build, root=root, until="build", dry_run=True)[-1].reason
    described = native_kernels.describe_kernels("auto")
    assert reason == f"CPU kernels changed from no native library to {described}"
    assert native_kernels.choose_kernels("auto") == "native"
    library.write_bytes(b"compiled again")
    assert native_kernels.describe_kernels("auto") != described

    put_library(monkeypatch, None)
    run_pipeline(pipeline(kernels="onnxruntime"), build, root=root, until="build", progress=Progress(stream))
    assert stream.getvalue().count("no native CPU kernels") == 1, "who asks for them is not told"


def test_a_pool_of_half_floats(root: Path, tmp_path: Path) -> None:
    half = Pipeline.model_validate(pipeline().model_dump() | {"kv_cache": {"max_blocks": 64, "dtype": "float16"}})
    check_runnable(half)
    run_pipeline(half, tmp_path / "build", root=root, until="build")
    assert load_engine_config(tmp_path / "build" / "engine").pool_dtype == "float16"


@pytest.mark.parametrize("weights_dtype", ["float32", "int8", "int4"])
def test_outputs_are_the_same_in_every_run(root: Path, tmp_path: Path, weights_dtype: str) -> None:
    for name in ("a", "b"):
        run_pipeline(pipeline(weights_dtype=weights_dtype), tmp_path / name, root=root, until="package")
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    assert len(hashes(tmp_path / "a")) == 4


def test_reproduce_makes_the_same_again(build_directory: Path, tmp_path: Path) -> None:
    script = build_directory / "engine" / "reproduce.sh"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([script, tmp_path / "again"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    again = hashes(tmp_path / "again")
    assert list(again) == ["convert", "check", "build"]
    assert again.items() <= hashes(build_directory).items()


def test_every_setting_is_read_by_a_stage() -> None:
    listed = {name for stage in STAGES for name in stage.settings}
    fields = {f"{name}.{key}" for name, block in BLOCKS.items() for key in block.model_fields}
    served = {field for field in fields if not field.startswith("train.")}  # the block that `draftline train` reads
    assert served - listed == {"target.checkpoint", "draft.checkpoint"}, "whose files count, not their place"
    assert listed - fields == {"name"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            lambda model: None,
            r"engine\.max_seq_len: the model knows 128 positions; got 256; lower engine\.max_seq_len to 128",
        ),
        (
            lambda model: _edit(model / "tokenizer_config.json", chat_template="{{ nothing.at.all }}"),
            r"model: the chat template renders a user's message; got .*; correct chat_template in",
        ),
        (
            lambda model: _edit(model / "tokenizer_config.json", chat_template="hello"),
            r"model: the chat template renders a user's message; got 'hello'; correct",
        ),
        (
            lambda model: _edit(model / "tokenizer.json", normalizer={"type": "Lowercase"}),
            r"model: the tokenizer gives back the text 'The quick.*; got 'the quick",
        ),
    ],
)
def test_check_refuses(tmp_path: Path, change: Callable[[Path], None], error: str) -> None:
    short = "128" in error
    model = write_tiny_checkpoint(tmp_path / "model", max_position_embeddings=128 if short else 512)
    change(model)
    with pytest.raises(CheckpointError, match=error):
        run_pipeline(pipeline(), tmp_path / "build", root=tmp_path)
    assert {path.name for path in (tmp_path / "build").iterdir()} == {".lock", "checkpoint"}


def _edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        (None, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_the_positions_a_model_knows(build_directory: Path, scaling: dict[str, Any] | None, limit: int) -> None:
    config = replace(load_checkpoint_config(build_directory / "checkpoint"), rotary_scaling=scaling)
    assert check_length(num_positions("model", config), limit) == limit
    with pytest.raises(CheckpointError, match=f"knows {limit} positions"):
        check_length(num_positions("model", config), limit + 1)


def test_heads_divide(build_directory: Path) -> None:
    config = load_checkpoint_config(build_directory / "checkpoint")
    check_heads("model", config)
    with pytest.raises(CheckpointError, match="got 4 and 3"):
        check_heads("model", replace(config, num_key_value_heads=3))


def test_smoke_keeps_times_out_of_its_output(
    root: Path, build_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = iter([{"text": " Paris", "ms_to_ready": 10.0}, {"text": " Paris", "ms_to_ready": 20.0}])
    monkeypatch.setattr("draftline.triton.smoke.smoke_test", lambda repository, pipeline, prompt: next(reports))
    manifests = []
    for _ in range(2):
        run_pipeline(pipeline(), build_directory, root=root)
        manifests.append(load_manifest(build_directory / "smoke"))
        shutil.rmtree(build_directory / "smoke")
    first, second = manifests
    assert first is not None
    assert second is not None
    assert first.result == {"report": {"text": " Paris", "ms_to_ready": 10.0}}
    assert first.outputs_sha256() == second.outputs_sha256()

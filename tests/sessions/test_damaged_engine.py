"""An engine directory that is damaged, foreign or of another version is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftline.errors import ArtifactError, DraftlineError
from draftline.generation import load_engine
from draftline.sessions.engine_config import load_engine_config
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("whole")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    return {dtype: build_tiny_engine(directory, checkpoint, weights_dtype=dtype) for dtype in ("float32", "int8")}


def copy_of(engine: Path, directory: Path) -> Path:
    """A copy of its own: a float32 engine shares its weights with the converted checkpoint by a hard link."""
    return Path(shutil.copytree(engine, directory / "engine"))


def edit_config(engine: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((engine / "config.json").read_text())
    change(document)
    (engine / "config.json").write_text(json.dumps(document))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def check_refused(engine: Path, *parts: str) -> None:
    with pytest.raises(DraftlineError) as caught:
        load_engine(engine)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for part in parts:
        assert part in message


def test_whole_engines_load(engines: dict[str, Path]) -> None:
    for engine in engines.values():
        with load_engine(engine) as loaded:
            assert loaded.generate([[5, 6, 7]], max_tokens=2)[0].metrics.num_input_tokens == 3


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda d: d.update(draftline_version="0.0.0"),
            ["config.json: draftline_version: this draftline", "got 0.0.0"],
        ),
        (lambda d: d.update(format_version=99), ["config.json: format_version", "got 99"]),
        (lambda d: d.pop("format_version"), ["config.json: format_version", "got None"]),
        (
            lambda d: d.update(backend="steam"),
            ["config.json: backend: is one of onnxruntime, tensorrt, tensorrt_rtx; got steam"],
        ),
        (lambda d: d.update(kernels="steam"), ["config.json: kernels: must be native or onnxruntime; got steam"]),
        (lambda d: d.update(pool_dtype="int3"), ["config.json: pool_dtype: must be float32 or float16; got int3"]),
        (lambda d: d.pop("model"), ["config.json", "model"]),
        (lambda d: d["model"].pop("head_size"), ["config.json", "head_size"]),
        (lambda d: d.update(colour="red"), ["config.json", "colour"]),
        (lambda d: d.update(model=[1]), ["config.json", "model"]),
    ],
)
def test_configs(
    engines: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any]], object], parts: list[str]
) -> None:
    engine = copy_of(engines["int8"], tmp_path)
    edit_config(engine, change)
    check_refused(engine, *parts)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", "\xff\xfe"])
def test_a_config_that_is_no_object(engines: dict[str, Path], tmp_path: Path, text: str) -> None:
    engine = copy_of(engines["int8"], tmp_path)
    (engine / "config.json").write_bytes(text.encode("latin-1"))
    check_refused(engine, "config.json: ")


def test_no_engine(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"an engine directory has a config\.json; got none; run `draftline run`"):
        load_engine_config(tmp_path / "nothing")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_cut_graphs_and_weights(engines: dict[str, Path], tmp_path: Path, dtype: str, kept: float) -> None:
    names = ["model.onnx", "weights.safetensors"] + (["rank0.safetensors"] if dtype == "float32" else [])
    for name in names:
        engine = copy_of(engines[dtype], tmp_path / name)
        cut(engine / name, int(kept * (engine / name).stat().st_size))
        check_refused(engine, "build the engine again")


@pytest.mark.parametrize("name", ["model.onnx", "weights.safetensors", "tokenizer.json"])
def test_missing_files(engines: dict[str, Path], tmp_path: Path, name: str) -> None:
    engine = copy_of(engines["int8"], tmp_path)
    (engine / name).unlink()
    check_refused(engine, str(engine))


def test_a_graph_that_is_something_else(engines: dict[str, Path], tmp_path: Path) -> None:
    engine = copy_of(engines["int8"], tmp_path)
    (engine / "model.onnx").write_bytes(b"GIF89a" * 100)
    check_refused(engine, "model.onnx")


def test_a_config_of_another_pool(engines: dict[str, Path], tmp_path: Path) -> None:
    engine = copy_of(engines["int8"], tmp_path)
    edit_config(engine, lambda d: d.update(pool_dtype="float16"))
    check_refused(engine, "model.onnx: reads the pools of config.json", "tensor(float16)", "build the engine again")


def test_a_config_of_another_model(engines: dict[str, Path], tmp_path: Path) -> None:
    """Pools are made from config.json: the graph would read them as something else."""
    engine = copy_of(engines["int8"], tmp_path)
    edit_config(engine, lambda d: d["model"].update(num_hidden_layers=3))
    check_refused(engine, str(engine))

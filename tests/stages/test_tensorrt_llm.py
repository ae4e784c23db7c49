"""The stages of TensorRT-LLM's own routes, on tiny checkpoints, without TensorRT-LLM."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftline.checkpoints.ranks.config import load_layout
from draftline.checkpoints.safetensors_file import tensor_locations
from draftline.config import Pipeline
from draftline.errors import BuildError, CheckpointError, PipelineError
from draftline.sessions.tensorrt_llm import OWN_ENGINE, EngineLimits, build_flags
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.stages.table import STAGES
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

LAYERS = (1, 2, 5)  # which its configuration names, and which can be read in two ways
BEFORE_SMOKE = [stage.name for stage in STAGES if stage.name != "smoke"]


def pipeline(route: str, method: str | None = None, tree: dict[str, Any] | None = None, **engine: Any) -> Pipeline:
    draft: dict[str, Any] | None = {"method": method} if method else None
    if draft and method != "ngram":
        draft["checkpoint"] = method
    if draft and method == "eagle3":
        draft["captured_layers"] = LAYERS
    return Pipeline.model_validate(
        {
            "name": "tiny",
            "target": {"checkpoint": "model", "dtype": "float16"},
            "draft": draft,
            "tree": tree,
            "engine": {
                "backend": "tensorrt_llm",
                "route": route,
                "weights_dtype": "float16",
                "max_seq_len": 256,
                **engine,
            },
            "kv_cache": {"max_blocks": 64, "dtype": "float16"},
        }
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    model = write_tiny_checkpoint(root / "model", num_layers=8)
    write_tiny_medusa(root / "medusa", model)
    write_tiny_eagle1(root / "eagle1", model)
    write_tiny_eagle3(root / "eagle3", model, captured_layers=LAYERS)
    write_tiny_checkpoint(root / "draft_model", num_layers=1)
    return root


@pytest.fixture(autouse=True)
def without_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


STATIC = {"kind": "static", "choices": ((0,), (1,), (0, 0))}


@pytest.mark.parametrize("method", [None, "medusa", "eagle1"])
def test_trtllm_build_up_to_the_repository(root: Path, tmp_path: Path, method: str | None) -> None:
    asked = pipeline("trtllm_build", method, STATIC if method else None, tensor_parallel_size=2)
    stream = io.StringIO()
    run_pipeline(asked, tmp_path / "build", root=root, until="package", progress=Progress(stream))
    said = stream.getvalue()
    assert "convert: 2 ranks: 2 divide the matrices, 1 the layers" in said
    assert "build: trtllm-build is not on PATH: engine/build.sh is the command; run it where TensorRT-LLM up to" in said
    layout = load_layout(tmp_path / "build" / "checkpoint")
    assert layout.mapping.tp_size == 2
    if layout.speculation is not None:
        assert layout.speculation.num_draft_tokens == 3
    script = (tmp_path / "build" / "engine" / "build.sh").read_text()
    assert ("--speculative_decoding_mode" in script) == (method is not None)
    config = (tmp_path / "build" / "model_repository" / "tensorrt_llm" / "config.pbtxt").read_text()
    assert str((tmp_path / "build").resolve() / OWN_ENGINE) in config
    report = json.loads((tmp_path / "build" / "check" / "report.json").read_text())
    assert report["perplexity"] is None
    for stage in BEFORE_SMOKE:
        directory = next(found.directory for found in STAGES if found.name == stage)
        assert (tmp_path / "build" / directory / "reproduce.sh").is_file()
    again = run_pipeline(asked, tmp_path / "build", root=root, until="package")
    assert [report.reason for report in again] == [None] * len(BEFORE_SMOKE)
    other = pipeline("trtllm_build", method, STATIC if method else None)
    (report, *_) = run_pipeline(other, tmp_path / "build", root=root, until="package", dry_run=True)
    assert report.reason == "setting engine.tensor_parallel_size changed from 2 to 1"


def write_builder(directory: Path, *, code: int = 0) -> None:
    """Write a ``trtllm-build`` that leaves an engine's ``config.json`` with its own command line."""
    directory.mkdir()
    program = directory / "trtllm-build"
    program.write_text(
        "#!/bin/sh\n"
        'echo "started"; echo "all weights were read" >&2\n'
        'while [ "$#" -gt 0 ]; do case "$1" in --output_dir) out=$2;; esac; words="$words $1"; shift; done\n'
        f'mkdir -p "$out"; printf \'{{"words": "%s"}}\' "$words" > "$out/config.json"; exit {code}\n'
    )
    program.chmod(0o755)


def test_the_engine_is_built_where_the_program_is(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pipeline("trtllm_build", "medusa", STATIC)
    build = tmp_path / "build"
    run_pipeline(asked, build, root=root, until="package")
    write_builder(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (*_, survey, _) = run_pipeline(asked, build, root=root, until="package", dry_run=True)
    assert survey.reason == "program trtllm-build changed from absent to on PATH"
    run_pipeline(asked, build, root=root, until="package")
    words = json.loads((build / "engine" / "config.json").read_text())["words"]
    assert f"--checkpoint_dir {build / 'checkpoint'}" in words
    assert "--speculative_decoding_mode medusa" in words
    assert "--max_draft_len 3" in words
    assert "all weights were read" in (build / "engine" / "build.log").read_text()
    assert f'"{build / "engine"}"' in (build / "model_repository" / "tensorrt_llm" / "config.pbtxt").read_text()


def test_the_script_asks_what_the_stage_asks(root: Path, tmp_path: Path) -> None:
    run_pipeline(pipeline("trtllm_build"), tmp_path / "build", root=root, until="build")
    write_builder(tmp_path / "bin")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    subprocess.run([tmp_path / "build" / "engine" / "build.sh"], env=environment, check=True, capture_output=True)
    words = json.loads((tmp_path / "build" / OWN_ENGINE / "config.json").read_text())["words"].split()
    flags = build_flags(EngineLimits(16, 256, 128, 16), "float16", 1)
    options = [word for pair in flags.items() for word in (f"--{pair[0]}", pair[1])]
    assert words[4:] == options


def test_a_build_that_fails_says_why(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_builder(tmp_path / "bin", code=3)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(
        BuildError, match=r"trtllm-build: .*; got exit code 3: started / all weights were read; read what"
    ):
        run_pipeline(pipeline("trtllm_build"), tmp_path / "build", root=root, until="build")
    assert not (tmp_path / "build" / "engine").exists()


def test_prompts_fit_in_a_step_where_prefill_is_not_chunked() -> None:
    plain, medusa = EngineLimits(4, 4096, 512, 32), EngineLimits(4, 4096, 512, 32, "medusa", 63)
    assert build_flags(plain, "float16", 1)["max_input_len"] == "4095"
    assert build_flags(medusa, "float16", 1)["max_input_len"] == "512"


@pytest.mark.parametrize(
    ("method", "tree", "draft"),
    [
        (None, None, None),
        ("eagle3", {"kind": "chain", "max_depth": 3}, "eagle3"),
        ("eagle3", {"kind": "dynamic", "max_depth": 3, "top_k": 4, "max_nodes": 13}, "eagle3"),
        ("draft_model", {"kind": "chain", "max_depth": 2}, "draft_model"),
        ("ngram", {"kind": "chain", "max_depth": 2}, None),
    ],
)
def test_llmapi_up_to_the_repository(
    root: Path, tmp_path: Path, method: str | None, tree: dict[str, Any] | None, draft: str | None
) -> None:
    run_pipeline(pipeline("llmapi", method, tree), tmp_path / "build", root=root, until="package")
    assert not list((tmp_path / "build").rglob("*.safetensors")), "it reads the published files"
    path = tmp_path / "build" / "model_repository" / "tensorrt_llm" / "1" / "model.yaml"
    settings = yaml.safe_load(path.read_text())
    assert settings["model"] == str(root.resolve() / "model")
    speculative = settings.get("speculative_config", {})
    assert speculative.get("speculative_model") == (str(root.resolve() / draft) if draft else None)
    assert speculative.get("eagle3_layers_to_capture") == ([1, 2, 5] if method == "eagle3" else None)


def test_there_is_no_smoke_stage_of_ours(root: Path, tmp_path: Path) -> None:
    rule = r"tiny: stage smoke: TensorRT-LLM's own server runs the package, .*; run it with --until package"
    with pytest.raises(PipelineError, match=rule):
        run_pipeline(pipeline("llmapi"), tmp_path / "build", root=root)
    assert not (tmp_path / "build").exists()


def test_llmapi_checks_what_it_does_not_convert(root: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "model", hidden_size=32, num_layers=8)
    write_tiny_eagle3(tmp_path / "eagle3", root / "model", captured_layers=LAYERS)
    asked = pipeline("llmapi", "eagle3", {"kind": "chain", "max_depth": 3})
    with pytest.raises(CheckpointError, match=r"target_hidden_size is the target's hidden_size"):
        run_pipeline(asked, tmp_path / "build", root=tmp_path, until="package")
    (other / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the folder holds one of"):
        run_pipeline(pipeline("llmapi"), tmp_path / "build", root=tmp_path, until="package")
    (other / "config.json").rename(other / "config.txt")
    with pytest.raises(CheckpointError, match=r"reads Hugging Face folders; got another checkpoint; give the folder"):
        run_pipeline(pipeline("llmapi"), tmp_path / "build", root=tmp_path, until="package")


def test_no_dynamic_tree_behind_a_window(root: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", "mistral", num_layers=8, extra_config={"sliding_window": 64})
    write_tiny_eagle3(tmp_path / "eagle3", root / "model", captured_layers=LAYERS)
    asked = pipeline("llmapi", "eagle3", {"kind": "dynamic", "max_depth": 3, "top_k": 4, "max_nodes": 13})
    with pytest.raises(
        CheckpointError, match=r"tree.kind: .* sliding window or latent attention; got sliding_window 64; set it"
    ):
        run_pipeline(asked, tmp_path / "build", root=tmp_path, until="package")


def test_both_routes_describe_the_same_target(root: Path, tmp_path: Path) -> None:
    for route in ("trtllm_build", "llmapi"):
        run_pipeline(pipeline(route), tmp_path / route, root=root, until="check")
    ours, theirs = ((tmp_path / route / "check" / "report.json").read_text() for route in ("trtllm_build", "llmapi"))
    assert ours == theirs
    locations = tensor_locations(tmp_path / "trtllm_build" / "checkpoint" / "rank0.safetensors")
    assert {location.dtype for location in locations.values()} == {"float16"}

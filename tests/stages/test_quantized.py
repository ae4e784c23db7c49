"""What the convert stage says of quantised checkpoints, on the routes that convert."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from draftline.config import Pipeline
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from tests.tiny_quantized import LAYOUTS, write_quantized


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    write_quantized(root / "model", LAYOUTS["gptq"], num_layers=1)
    write_quantized(root / "small", LAYOUTS["modelopt-fp8"], num_layers=1)
    return root


def said_by_convert(root: Path, build: Path, **blocks: Any) -> str:
    pipeline = Pipeline.model_validate({"name": "tiny", "target": {"checkpoint": "model"}, **blocks})
    stream = io.StringIO()
    run_pipeline(pipeline, build, root=root, until="convert", progress=Progress(stream))
    return stream.getvalue()


def test_a_target_and_a_draft_model(root: Path, tmp_path: Path) -> None:
    draft = [{"method": "draft_model", "checkpoint": "small"}]
    said = said_by_convert(root, tmp_path / "build", draft=draft, tree={"max_depth": 3}, engine={"max_seq_len": 256})
    assert "convert: target: quantised: GPTQ version 1, 4 bits in groups of 32 inputs; 7 matrices\n" in said
    assert "convert: target: each weight is read as its code times its scale, in float32" in said
    assert "convert: draft_model: quantised: ModelOpt, FP8 (E4M3), a scale for each matrix; 7 matrices\n" in said
    assert "convert: draft_model: left out, as draftline computes without them: 7 input_scale\n" in said


def test_ranks_of_tensorrt_llm(root: Path, tmp_path: Path) -> None:
    said = said_by_convert(
        root,
        tmp_path / "build",
        target={"checkpoint": "model", "dtype": "float16"},
        engine={
            "backend": "tensorrt_llm",
            "route": "trtllm_build",
            "tensor_parallel_size": 2,
            "weights_dtype": "float16",
            "max_seq_len": 256,
        },
        kv_cache={"dtype": "float16"},
    )
    assert "convert: target: quantised: GPTQ version 1, 4 bits in groups of 32 inputs; 7 matrices\n" in said
    assert (tmp_path / "build" / "checkpoint" / "rank1.safetensors").is_file()

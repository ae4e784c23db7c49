"""Rules of pipelines for engines on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.config import load_pipeline
from draftline.errors import PipelineErrors
from draftline.share import share_path

RTX = share_path("pipelines") / "smollm2-135m-rtx.yaml"
PLAIN = share_path("pipelines") / "smollm2-135m.yaml"
FLOAT32 = ("target.dtype=float32", "engine.weights_dtype=float32", "kv_cache.dtype=float32")


@pytest.mark.parametrize(
    ("file", "overrides", "message"),
    [
        (
            RTX,
            ["engine.weights_dtype=float32"],
            "target.dtype float16 with weights of the same dtype, of float8 .* or of int4 .*; got float32; set both",
        ),
        (RTX, ["engine.weights_dtype=int8"], "of int4 in float16; got int8; "),
        (RTX, ["engine.weights_dtype=float8"], "compute with it, 89 and up; got 80, 86, 89, 120; remove those below"),
        (RTX, [*FLOAT32[::2], "engine.weights_dtype=float8"], "of float8 in 16 bits, .*; got float8; "),
        (
            RTX,
            ["kv_cache.dtype=float32"],
            "in target.dtype float16 or in float8; got float32; set it to float16",
        ),
        (RTX, ["engine.compute_capabilities=[90]"], "not build for Hopper .*; got 90; .* engine.backend to tensorrt"),
        (RTX, ["engine.compute_capabilities=[89, 100]"], "not build for Hopper .*; got 89, 100; "),
        (RTX, ["engine.compute_capabilities=[89, 80]"], "rise; got 89, 80; list each once, in order"),
        (RTX, ["engine.compute_capabilities=[89, 89]"], "rise; got 89, 89; "),
        (RTX, ["engine.compute_capabilities=[70]"], r"is a list of 80 \| 86 \| 89 \| 90 \| 100 \| 120; got a list; "),
        (RTX, ["engine.backend=tensorrt"], "stands beside engine.backend tensorrt_rtx; got 80, 86, 89, 120; remove it"),
        (PLAIN, ["engine.compute_capabilities=[89]"], "stands beside engine.backend tensorrt_rtx; got 89; remove it"),
        (PLAIN, ["engine.cuda_graphs=false"], "cuda_graphs: false stands beside .*; got False; remove it: onnxruntime"),
        (
            PLAIN,
            ["kv_cache.free_gpu_memory_fraction=0.5"],
            "free_gpu_memory_fraction: stands beside .*; got 0.5; remove it: the pool of onnxruntime",
        ),
        (RTX, ["kv_cache.free_gpu_memory_fraction=0"], "free_gpu_memory_fraction: "),
        (PLAIN, ["engine.weights=external"], "external stands beside engine.backend tensorrt and .*; got external; "),
        (PLAIN, ["engine.weights_dtype=float16"], "onnxruntime keeps weights in float32, int8 or int4; got float16; "),
    ],
)
def test_what_does_not_fit_together(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PipelineErrors, match=message):
        load_pipeline(file, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.compute_capabilities=[]"],
        ["engine.weights=external"],
        ["engine.cuda_graphs=false", "kv_cache.free_gpu_memory_fraction=0.5"],
        FLOAT32,
        ["kv_cache.dtype=float8"],
        ["engine.weights_dtype=float8", "engine.compute_capabilities=[89, 120]"],
        ["engine.weights_dtype=float8", "engine.compute_capabilities=[]", "engine.weights=external"],
        [*FLOAT32[:2], "kv_cache.dtype=float16"],
        ["engine.backend=tensorrt", "engine.compute_capabilities=[]"],
    ],
)
def test_what_does(overrides: list[str]) -> None:
    load_pipeline(RTX, overrides)

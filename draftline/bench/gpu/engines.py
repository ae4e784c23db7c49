"""Part ``engines``: build the CPU engine that is compared with, and engines of SmolLM2-135M for this GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftline.bench.gpu.device import open_gpu
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.plugin import backend_of
from draftline.errors import BuildError
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.share import share_path

REFERENCE = "cpu"
LOG_LINES = 3


@dataclass(frozen=True)
class CheckedEngine:
    """``dtype``: of its network, by which tolerances go. ``pipeline``: the file it is built from."""

    name: str
    pipeline: str
    dtype: NetworkDtype

    def overrides(self, backend: str, architecture: int) -> list[str]:
        """Return what differs from the pipeline file: the GPU, the dtype, and checks of other machines."""
        dtypes = [f"{field}={self.dtype}" for field in ("target.dtype", "engine.weights_dtype", "kv_cache.dtype")]
        capabilities = str([architecture] if backend == "tensorrt_rtx" else [])  # TensorRT builds for where it runs
        gpu = [f"engine.backend={backend}", f"engine.compute_capabilities={capabilities}"]
        return [*dtypes, *gpu, "check.network=never", "check.perplexity=never"]


# float32 is the sharp comparison, the others are what is served. The head that is trained overflows float16.
ENGINES = (
    CheckedEngine("eagle3-float32", "smollm2-135m-eagle3-rtx.yaml", "float32"),
    CheckedEngine("plain-float16", "smollm2-135m-rtx.yaml", "float16"),
    CheckedEngine("eagle3-bfloat16", "smollm2-135m-eagle3-rtx.yaml", "bfloat16"),
)


def engine_path(output: Path, name: str) -> Path:
    return output / name / "engine"


def check_engines(call: PartCall) -> None:
    """Build them by ``draftline run``, each in a process of its own; one that fails leaves the others."""
    gpu = open_gpu()
    backend, failed = backend_of(gpu.architecture), []
    builds = [(REFERENCE, "smollm2-135m.yaml", ["check.perplexity=never"])]
    builds += [(engine.name, engine.pipeline, engine.overrides(backend, gpu.architecture)) for engine in ENGINES]
    for name, pipeline, overrides in builds:
        started = time.monotonic()
        error = run_build(share_path("pipelines") / pipeline, call.output / name, overrides)
        if error:
            failed.append(f"{name}: {error}")
        call.tell(Finding(f"{name}, from {pipeline}", time.monotonic() - started, "s to build", note=error))
    if failed:
        raise BuildError("engines", "are all built", "; ".join(failed), "see engines.log beside the report")


def run_build(pipeline: Path, output: Path, overrides: list[str]) -> str:
    """Build an engine; return the end of what it said where it failed, else nothing."""
    command = [sys.executable, "-m", "draftline", "run", str(pipeline), "--until", "build", "--output", str(output)]
    answer = subprocess.run([*command, *overrides], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    print(answer.stderr, file=sys.stderr, flush=True)
    lines = answer.stderr.strip().splitlines()
    return "" if answer.returncode == 0 else " / ".join(lines[-LOG_LINES:]) or f"status {answer.returncode}"

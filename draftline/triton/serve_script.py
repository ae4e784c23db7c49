"""``serve.sh`` of a repository that TensorRT-LLM's own Triton server runs.

Source: ``launch_triton_server.py`` of TensorRT-LLM. One server for each rank: the first answers, the others load the
engine alone, and all are processes of one ``mpirun``. Unlike there, the first listens where the pipeline says.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = "serve.sh"


def write_tensorrtllm_script(destination: Path, pipeline: Any, engine: Path) -> None:
    """Write the script for the ``tensorrtllm`` backend: it refuses to start without the engine."""
    world_size = pipeline.engine.tensor_parallel_size * pipeline.engine.pipeline_parallel_size
    config = shlex.quote(str(engine / "config.json"))
    missing = f"{engine}: the engine is built; got no config.json; run engine/build.sh, or package again after a move"
    lines = [f"test -f {config} || {{ echo {shlex.quote(missing)} >&2; exit 2; }}"]
    if world_size == 1:
        lines.append(f"exec {_server(pipeline, 0)}")
    else:
        ranks = [f"-n 1 {_server(pipeline, rank)}" for rank in range(world_size)]
        lines.append(" : \\\n  ".join([f"exec mpirun --allow-run-as-root {ranks[0]}", *ranks[1:]]))
    _write(destination, "TensorRT-LLM up to 1.2.1", lines)


def write_llmapi_script(destination: Path, pipeline: Any) -> None:
    """Write the script for the ``llmapi`` model, which starts the other ranks itself."""
    _write(destination, "TensorRT-LLM 1.3 or later", [f"exec {_server(pipeline, 0)}"])


def _server(pipeline: Any, rank: int) -> str:
    serve = pipeline.serve
    options = [
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name=draftline{rank}_",
        f"--http-address={serve.host}",
        f"--grpc-address={serve.host}",
        f"--http-port={serve.http_port}",
        f"--grpc-port={serve.grpc_port}",
        f"--metrics-port={serve.metrics_port}",
    ]
    if rank > 0:
        options = ["--model-control-mode=explicit", "--load-model=tensorrt_llm", *options]
    return 'tritonserver --model-repository="$here" ' + " ".join(map(shlex.quote, options))


def _write(destination: Path, where: str, lines: Sequence[str]) -> None:
    script = destination / SCRIPT
    start = ["#!/bin/sh", f"# Serves this repository where Triton with {where} and draftline are installed.", "set -eu"]
    here = 'here=$(cd -- "$(dirname -- "$0")" && pwd)'
    script.write_text("\n".join([*start, here, *lines]) + "\n", encoding="utf-8")
    script.chmod(0o755)

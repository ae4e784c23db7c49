"""smoke: the packaged model answers one request from a real Triton server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from draftline.stages.stage import Stage, StageCall

PROMPT = "The capital of France is"


@dataclass(frozen=True)
class SmokeResult:
    """What the server said; the times are in the manifest only, so that equal answers are equal outputs."""

    report: dict[str, Any]


def run(call: StageCall) -> SmokeResult:
    """Start the server on free ports, send one request, stop it, and write ``report.json``."""
    from draftline.triton.smoke import smoke_test

    report = smoke_test(call.build_directory / "model_repository", call.pipeline, PROMPT)
    answer = {"prompt": PROMPT, "text": report["text"]}
    (call.destination / "report.json").write_text(json.dumps(answer, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return SmokeResult(report)


STAGE = Stage(
    name="smoke",
    directory="smoke",
    run=run,
    needs=("build", "package"),
    packages=("numpy", "onnxruntime", "tritonclient", "nvidia-pytriton"),
    modules=("draftline.stages.smoke",),
    shared=("model_repo",),
)

"""What of the schema this version can run."""

from __future__ import annotations

from collections.abc import Collection

from draftline.config.rules import GPU_BACKENDS
from draftline.config.schema import Pipeline
from draftline.errors import PipelineError, PipelineErrors

SERVING_STAGES = ("package", "smoke")


def check_runnable(pipeline: Pipeline, stages: Collection[str] = ()) -> None:
    """Refuse a valid pipeline that this version cannot run through ``stages``, before any work.

    Raises: PipelineErrors with every reason.
    """
    problems = []

    def refuse(field: str, rule: str, got: object, cure: str) -> None:
        problems.append(PipelineError(f"{pipeline.name}: {field}", rule, got, cure))

    backend = pipeline.engine.backend
    if backend == "tensorrt_llm":
        known = f"onnxruntime, {' and '.join(GPU_BACKENDS)}"
        refuse("engine.backend", f"this version builds engines of {known}", backend, "set it to onnxruntime")
    elif backend in GPU_BACKENDS:
        for stage in SERVING_STAGES:
            if stage in stages:
                rule = "engines on a GPU are built by this version, and not served"
                cure = "run it with --until build, or set engine.backend to onnxruntime"
                refuse(f"stage {stage}", rule, f"engine.backend {backend}", cure)
    elif pipeline.kv_cache.dtype not in ("float32", "float16"):
        refuse(
            "kv_cache.dtype",
            "onnxruntime keeps keys and values in float32 or float16",
            pipeline.kv_cache.dtype,
            "set it to float16",
        )
    if problems:
        raise PipelineErrors(problems)

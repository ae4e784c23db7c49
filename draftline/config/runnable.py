"""What of the schema this version can run."""

from __future__ import annotations

from draftline.config.rules import GPU_BACKENDS
from draftline.config.schema import Pipeline
from draftline.errors import PipelineError, PipelineErrors


def check_runnable(pipeline: Pipeline) -> None:
    """Refuse a valid pipeline that this version cannot run, before any work.

    Raises: PipelineErrors with every reason.
    """
    problems = []

    def refuse(field: str, rule: str, got: object, cure: str) -> None:
        problems.append(PipelineError(f"{pipeline.name}: {field}", rule, got, cure))

    backend = pipeline.engine.backend
    if backend == "tensorrt_llm":
        known = f"onnxruntime, {' and '.join(GPU_BACKENDS)}"
        refuse("engine.backend", f"this version builds engines of {known}", backend, "set it to onnxruntime")
    elif backend not in GPU_BACKENDS and pipeline.kv_cache.dtype not in ("float32", "float16"):
        refuse(
            "kv_cache.dtype",
            "onnxruntime keeps keys and values in float32 or float16",
            pipeline.kv_cache.dtype,
            "set it to float16",
        )
    if problems:
        raise PipelineErrors(problems)

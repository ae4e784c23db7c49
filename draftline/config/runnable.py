"""What of the schema this version can run."""

from __future__ import annotations

from draftline.config.schema import Pipeline
from draftline.errors import PipelineError, PipelineErrors


def check_runnable(pipeline: Pipeline) -> None:
    """Refuse a valid pipeline that this version cannot run, before any work.

    Raises: PipelineErrors with every reason.
    """
    problems = []

    def refuse(field: str, rule: str, got: object, cure: str) -> None:
        problems.append(PipelineError(f"{pipeline.name}: {field}", rule, got, cure))

    if pipeline.engine.backend != "onnxruntime":
        refuse("engine.backend", "this version runs onnxruntime", pipeline.engine.backend, "set it to onnxruntime")
    elif pipeline.kv_cache.dtype == "bfloat16":
        refuse(
            "kv_cache.dtype",
            "onnxruntime keeps keys and values in float32 or float16",
            pipeline.kv_cache.dtype,
            "set it to float16",
        )
    if problems:
        raise PipelineErrors(problems)

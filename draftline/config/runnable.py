"""What of the schema this version can run."""

from __future__ import annotations

from draftline.config.schema import Pipeline
from draftline.errors import PipelineError, PipelineErrors


def check_runnable(pipeline: Pipeline) -> None:
    """Refuse a valid pipeline that this version cannot run, before any work.

    Raises: PipelineErrors.
    """
    pool = pipeline.kv_cache.dtype
    if pipeline.engine.backend == "onnxruntime" and pool not in ("float32", "float16"):
        rule = "onnxruntime keeps keys and values in float32 or float16"
        raise PipelineErrors([PipelineError(f"{pipeline.name}: kv_cache.dtype", rule, pool, "set it to float16")])

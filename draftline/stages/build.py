"""build: the engine, a graph over the converted checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftline.config import Pipeline
from draftline.stages.stage import Stage, StageCall


@dataclass(frozen=True)
class BuildResult:
    kernels: str
    weights_dtype: str
    engine_bytes: int


def run(call: StageCall) -> BuildResult:
    """Write ``model.onnx``, ``config.json``, the weights, the drafts and the tokenizer's files."""
    from draftline.sessions.native_kernels import CURE, choose_kernels, why_not_native
    from draftline.sessions.onnxruntime_builder import DraftSource, build_engine
    from draftline.stages.drafts import acceptance, draft_checkpoint, tree_shape

    engine, kv_cache = call.pipeline.engine, call.pipeline.kv_cache
    assert kv_cache.dtype != "bfloat16", "such a pipeline is refused"
    kernels = choose_kernels(engine.kernels)
    if kernels != "native" and engine.kernels == "auto":
        call.say(f"no native CPU kernels ({why_not_native()}): ONNX Runtime's serve, slower; {CURE}")
    drafts = [
        DraftSource(
            draft.method,
            draft_checkpoint(call.build_directory, index) if draft.checkpoint else None,
            draft.weights_dtype,
        )
        for index, draft in enumerate(call.pipeline.draft)
    ]
    build_engine(
        call.build_directory / "checkpoint",
        call.destination,
        weights_dtype=engine.weights_dtype,
        pool_dtype=kv_cache.dtype,
        kernels=kernels,
        max_batch_size=engine.max_batch_size,
        max_seq_len=engine.max_seq_len,
        max_num_tokens=engine.max_num_tokens,
        num_threads=engine.num_threads,
        block_size=kv_cache.block_size,
        max_blocks=kv_cache.max_blocks,
        prefix_cache=kv_cache.prefix_cache,
        progress=call.advance,
        drafts=drafts,
        tree=tree_shape(call.pipeline),
        acceptance=acceptance(call.pipeline),
    )
    files = [path for path in call.destination.rglob("*") if path.is_file()]
    return BuildResult(kernels, engine.weights_dtype, sum(path.stat().st_size for path in files))


def machine(pipeline: Pipeline) -> Mapping[str, str]:
    """Return whether there are native CPU kernels, and which: ``auto`` follows them."""
    from draftline.sessions.native_kernels import describe_kernels

    return {"CPU kernels": describe_kernels(pipeline.engine.kernels)}


STAGE = Stage(
    name="build",
    directory="engine",
    run=run,
    settings=(
        "draft.method",
        "draft.weights_dtype",
        "tree.kind",
        "tree.choices",
        "tree.max_nodes",
        "tree.max_depth",
        "tree.top_k",
        "acceptance.rule",
        "acceptance.epsilon",
        "acceptance.alpha",
        "engine.backend",
        "engine.kernels",
        "engine.weights_dtype",
        "engine.max_batch_size",
        "engine.max_seq_len",
        "engine.max_num_tokens",
        "engine.num_threads",
        "kv_cache.block_size",
        "kv_cache.max_blocks",
        "kv_cache.dtype",
        "kv_cache.prefix_cache",
    ),
    needs=("convert",),
    packages=("numpy", "onnx", "onnxruntime"),
    modules=("draftline.stages.build",),
    machine=machine,
)

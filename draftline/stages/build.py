"""build: the engine: graphs over the converted checkpoint's weights, or a vendor's plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftline.config import Pipeline
from draftline.stages.gpu import gpu_inputs
from draftline.stages.stage import Stage, StageCall
from draftline.stages.tensorrt_llm import builder_inputs, is_tensorrt_llm


@dataclass(frozen=True)
class BuildResult:
    kernels: str
    weights_dtype: str
    engine_bytes: int


def run(call: StageCall) -> BuildResult:
    """Write ``model.onnx`` or ``model.plan``, ``config.json``, the weights, the drafts and the tokenizer's files.

    For TensorRT-LLM's own routes: what ``stages.tensorrt_llm`` says.
    """
    from draftline.stages.gpu import build_plans, is_on_gpu

    if is_tensorrt_llm(call.pipeline):
        from draftline.stages.tensorrt_llm import build

        build(call)
        kernels = "tensorrt_llm"
    elif is_on_gpu(call.pipeline):
        build_plans(call)
        kernels = "plugin"
    else:
        kernels = _build_graphs(call)
    files = [path for path in call.destination.rglob("*") if path.is_file()]
    return BuildResult(kernels, call.pipeline.engine.weights_dtype, sum(path.stat().st_size for path in files))


def _build_graphs(call: StageCall) -> str:
    """Build for ONNX Runtime; return whose operators the graphs are made of."""
    from draftline.sessions.native_kernels import CURE, choose_kernels, why_not_native
    from draftline.sessions.onnxruntime_builder import build_engine
    from draftline.stages.drafts import CAPTURED_LAYERS_FILE, acceptance, draft_sources, tree_shape

    engine, kv_cache = call.pipeline.engine, call.pipeline.kv_cache
    assert kv_cache.dtype in ("float32", "float16"), "others are refused"
    kernels = choose_kernels(engine.kernels)
    if kernels != "native" and engine.kernels == "auto":
        call.say(f"no native CPU kernels ({why_not_native()}): ONNX Runtime's serve, slower; {CURE}")
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
        drafts=draft_sources(
            call.pipeline, call.build_directory, call.build_directory / "check" / CAPTURED_LAYERS_FILE
        ),
        tree=tree_shape(call.pipeline),
        acceptance=acceptance(call.pipeline),
    )
    return kernels


def machine(pipeline: Pipeline) -> Mapping[str, str]:
    """Return whether there are native CPU kernels, and which: ``auto`` follows them; on GPUs, vendors' packages.

    For TensorRT-LLM's own routes: whether its builder is here.
    """
    from draftline.sessions.native_kernels import describe_kernels

    if is_tensorrt_llm(pipeline):
        return builder_inputs(pipeline)
    return {"CPU kernels": describe_kernels(pipeline.engine.kernels), **gpu_inputs(pipeline)}


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
        "target.dtype",
        "engine.backend",
        "engine.route",
        "engine.tensor_parallel_size",
        "engine.pipeline_parallel_size",
        "engine.kernels",
        "engine.weights_dtype",
        "engine.weights",
        "engine.plugin",
        "engine.compute_capabilities",
        "engine.cuda_graphs",
        "engine.max_batch_size",
        "engine.max_seq_len",
        "engine.max_num_tokens",
        "engine.num_threads",
        "kv_cache.block_size",
        "kv_cache.max_blocks",
        "kv_cache.dtype",
        "kv_cache.free_gpu_memory_fraction",
        "kv_cache.prefix_cache",
    ),
    needs=("convert",),
    reads=("check/captured_layers.json",),
    packages=("numpy", "onnx", "onnxruntime"),
    modules=("draftline.stages.build",),
    shared=("plugins",),
    machine=machine,
)

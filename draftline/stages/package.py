"""package: the Triton model repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftline.config import Pipeline
from draftline.stages.stage import Stage, StageCall
from draftline.stages.tensorrt_llm import is_tensorrt_llm, repository_inputs


@dataclass(frozen=True)
class PackageResult:
    models: tuple[str, ...]


def run(call: StageCall) -> PackageResult:
    """Write the classic ensemble, whose models find the engine beside the repository.

    For TensorRT-LLM's own routes: what ``stages.tensorrt_llm`` says.
    """
    if is_tensorrt_llm(call.pipeline):
        from draftline.stages.tensorrt_llm import package

        package(call)
        return _result(call)
    from draftline.triton.repository import write_model_repository

    write_model_repository(call.build_directory, call.destination, call.pipeline)
    return _result(call)


def _result(call: StageCall) -> PackageResult:
    return PackageResult(tuple(sorted(path.parent.name for path in call.destination.glob("*/config.pbtxt"))))


def machine(pipeline: Pipeline) -> Mapping[str, str]:
    """Return no part of this machine: the settings that count for TensorRT-LLM's own routes alone."""
    return repository_inputs(pipeline)


STAGE = Stage(
    name="package",
    directory="model_repository",
    run=run,
    settings=(
        "name",
        "engine.max_batch_size",
        "kv_cache.block_size",
        "kv_cache.max_blocks",
        "kv_cache.prefix_cache",
        "serve.host",
        "serve.http_port",
        "serve.grpc_port",
        "serve.metrics_port",
    ),
    needs=("convert", "build"),
    packages=("protobuf", "tritonclient"),
    modules=("draftline.stages.package",),
    shared=("model_repo",),
    machine=machine,
)

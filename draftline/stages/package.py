"""package: the Triton model repository."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.stages.stage import Stage, StageCall


@dataclass(frozen=True)
class PackageResult:
    models: tuple[str, ...]


def run(call: StageCall) -> PackageResult:
    """Write the classic ensemble, whose models find the engine beside the repository."""
    from draftline.triton.repository import write_model_repository

    write_model_repository(call.build_directory, call.destination, call.pipeline)
    return PackageResult(tuple(sorted(path.parent.name for path in call.destination.glob("*/config.pbtxt"))))


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
    needs=("build",),
    packages=("protobuf", "tritonclient"),
    modules=("draftline.stages.package",),
    shared=("model_repo",),
)

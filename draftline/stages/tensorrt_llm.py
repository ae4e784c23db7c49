"""What the stages do for TensorRT-LLM's own routes.

| stage | ``trtllm_build`` | ``llmapi`` |
| --- | --- | --- |
| convert | its checkpoint, for all ranks, the head inside | checks the published checkpoints, which it reads itself |
| check | limits and tokenizer | the same |
| build | ``build.sh``, and the engine where ``trtllm-build`` is on PATH | nothing to build |
| package | repository for Triton's ``tensorrtllm`` backend | its ``llmapi`` model, and the classic names before it |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, cast

from draftline.config import Pipeline
from draftline.config.tensorrt_llm import BACKEND
from draftline.errors import CheckpointError, PipelineError
from draftline.stages.conversion import ConvertResult, say_notes
from draftline.stages.inputs import package_version
from draftline.stages.stage import StageCall, setting_of

if TYPE_CHECKING:
    from draftline.checkpoints.config import CheckpointConfig
    from draftline.checkpoints.llmapi import Published
    from draftline.checkpoints.ranks.convert import HeadSource
    from draftline.sessions.tensorrt_llm import EngineLimits

# What the output of a stage depends on, beside what it depends on for every backend.
CHECKPOINT_SETTINGS = ("engine.backend", "tree.kind", "tree.choices", "tree.max_depth")
REPOSITORY_SETTINGS = (
    *CHECKPOINT_SETTINGS,
    "target.checkpoint",
    "draft.checkpoint",
    "draft.method",
    "engine.route",
    "engine.tensor_parallel_size",
    "engine.pipeline_parallel_size",
    "engine.max_seq_len",
    "engine.max_num_tokens",
    "kv_cache.free_gpu_memory_fraction",
    "target.dtype",
    "tree.max_nodes",
    "tree.top_k",
)


def is_tensorrt_llm(pipeline: Pipeline) -> bool:
    return pipeline.engine.backend == BACKEND


def checkpoint_inputs(pipeline: Pipeline) -> dict[str, str]:
    """Return the inputs of the convert stage that count on these routes alone."""
    return _settings(pipeline, CHECKPOINT_SETTINGS)


def repository_inputs(pipeline: Pipeline) -> dict[str, str]:
    """Return the inputs of the package stage that count on these routes alone."""
    return _settings(pipeline, REPOSITORY_SETTINGS)


def _settings(pipeline: Pipeline, names: Sequence[str]) -> dict[str, str]:
    if not is_tensorrt_llm(pipeline):
        return {}
    return {f"setting {name}": json.dumps(setting_of(pipeline, name)) for name in names}


def builder_inputs(pipeline: Pipeline) -> dict[str, str]:
    """Return what the build stage finds on this machine: a build without ``trtllm-build`` runs again where it is."""
    if pipeline.engine.route != "trtllm_build":
        return {}
    from draftline.sessions.tensorrt_llm import PROGRAM, find_builder

    found = "absent" if find_builder() is None else "on PATH"
    return {f"program {PROGRAM}": found, "package tensorrt-llm": package_version("tensorrt-llm")}


def check_stages(pipeline: Pipeline, stages: Collection[str]) -> None:
    """Refuse, before any work, the stage that these routes have not. Raises: PipelineError."""
    if is_tensorrt_llm(pipeline) and "smoke" in stages:
        rule = "TensorRT-LLM's own server runs the package, with model_repository/serve.sh"
        where, got = f"{pipeline.name}: stage smoke", f"engine.backend {BACKEND}"
        raise PipelineError(where, rule, got, "run it with --until package")


def convert(call: StageCall) -> ConvertResult:
    """Write the checkpoint of ``trtllm-build``, or what ``llmapi`` is to read."""
    from draftline.checkpoints.ranks.convert import convert_for_ranks
    from draftline.checkpoints.ranks.mapping import Mapping

    engine, dtype = call.pipeline.engine, call.pipeline.target.dtype
    if engine.route == "llmapi":
        from draftline.checkpoints.llmapi import check_published

        (draft,) = call.pipeline.draft or (None,)
        source, method, layers = None, None, None
        if draft is not None:
            source, method, layers = call.draft_sources[0], draft.method, draft.captured_layers
        target = check_published(call.source, source, method, dtype, call.destination, layers)
        _check_tree(call.pipeline, target)
        sizes = (target.architecture, dtype, target.num_hidden_layers, target.hidden_size, target.vocab_size)
        return ConvertResult(*sizes, tuple(0 for _ in call.pipeline.draft))
    mapping = Mapping(engine.tensor_parallel_size, engine.pipeline_parallel_size)
    layout = convert_for_ranks(call.source, call.destination, dtype, mapping, _head(call), call.advance)
    config = layout.config
    say_notes(call, "target", call.source)
    num_layers = (layout.speculation.head.num_layers,) if layout.speculation else ()
    if mapping.world_size > 1:
        call.say(f"{mapping.world_size} ranks: {mapping.tp_size} divide the matrices, {mapping.pp_size} the layers")
    return ConvertResult(
        config.architecture, dtype, config.num_hidden_layers, config.hidden_size, config.vocab_size, num_layers
    )


def _check_tree(pipeline: Pipeline, target: Published) -> None:
    """Raise CheckpointError for a dynamic tree of a target that TensorRT-LLM grows none of."""
    if pipeline.tree is None or pipeline.tree.kind != "dynamic":
        return
    for what, value in (("sliding_window", target.sliding_window), ("kv_lora_rank", target.latent_rank)):
        if value is not None:
            rule = "TensorRT-LLM grows no dynamic trees of a target with a sliding window or latent attention"
            raise CheckpointError("tree.kind", rule, f"{what} {value}", "set it to chain")


def _head(call: StageCall) -> HeadSource | None:
    from draftline.checkpoints.ranks.convert import HeadSource
    from draftline.checkpoints.ranks.layout import MAX_NON_LEAVES_PER_LAYER
    from draftline.stages.drafts import static_choices

    if not call.pipeline.draft:
        return None
    choices = static_choices(call.pipeline)
    parents = Counter(len(path) for path in {path[:-1] for path in choices})
    method, source = call.pipeline.draft[0].method, call.draft_sources[0]
    assert method in ("medusa", "eagle1"), "others are refused"
    assert source is not None, "these have weights"
    return HeadSource(
        source,
        method,
        num_draft_tokens=len(choices),
        max_depth=max(map(len, choices)),
        max_non_leaves=max(MAX_NON_LEAVES_PER_LAYER, *parents.values()),
    )


def load_target(call: StageCall) -> CheckpointConfig | Published:
    """Read what the convert stage says of the target."""
    checkpoint = call.build_directory / "checkpoint"
    if call.pipeline.engine.route == "llmapi":
        from draftline.checkpoints.llmapi import load_published

        return load_published(checkpoint)
    from draftline.checkpoints.ranks.config import load_layout

    return load_layout(checkpoint).config


def engine_limits(pipeline: Pipeline) -> EngineLimits:
    from draftline.sessions.tensorrt_llm import EngineLimits
    from draftline.stages.drafts import static_choices

    engine = pipeline.engine
    limits = (engine.max_batch_size, engine.max_seq_len, engine.max_num_tokens, pipeline.kv_cache.block_size)
    if not pipeline.draft:
        return EngineLimits(*limits)
    method = cast(Literal["medusa", "eagle1"], pipeline.draft[0].method)
    return EngineLimits(*limits, method, len(static_choices(pipeline)))


def build(call: StageCall) -> None:
    """Write ``build.sh``, and the engine where the program for it is on PATH."""
    engine = call.pipeline.engine
    if engine.route == "llmapi":
        call.say("TensorRT-LLM's PyTorch backend builds nothing beforehand")
        return
    from draftline.sessions.tensorrt_llm import CURE, PROGRAM, build_flags, build_script, find_builder, run_builder

    world_size = engine.tensor_parallel_size * engine.pipeline_parallel_size
    flags = build_flags(engine_limits(call.pipeline), call.pipeline.target.dtype, world_size)
    script = call.destination / "build.sh"
    script.write_text(build_script(flags), encoding="utf-8")
    script.chmod(0o755)
    builder = find_builder()
    if builder is None:
        call.say(f"{PROGRAM} is not on PATH: engine/build.sh is the command; {CURE}, or run this pipeline again there")
        return
    call.say(f"{builder}; what it says is in engine/build.log")
    run_builder(builder, call.build_directory / "checkpoint", call.destination, flags)


def package(call: StageCall) -> None:
    """Write the model repository of the route."""
    if call.pipeline.engine.route == "llmapi":
        from draftline.checkpoints.llmapi import load_published
        from draftline.checkpoints.tokenizer import load_tokenizer
        from draftline.triton.llmapi_repository import write_llmapi_repository

        draft = call.draft_sources[0] if call.draft_sources else None
        checkpoint = call.build_directory / "checkpoint"
        write_llmapi_repository(
            call.destination,
            call.pipeline,
            call.source.resolve(),
            draft.resolve() if draft else None,
            load_published(checkpoint).captured_layers,
            load_tokenizer(checkpoint),
        )
        return
    from draftline.sessions.tensorrt_llm import OWN_ENGINE
    from draftline.stages.drafts import static_choices
    from draftline.triton.tensorrtllm_repository import write_tensorrtllm_repository

    engine = call.build_directory / "engine"
    if not (engine / "config.json").is_file():
        engine = call.build_directory / OWN_ENGINE
        call.say(f"no engine was built here: the repository names {engine}, where engine/build.sh will leave it")
    write_tensorrtllm_repository(
        call.build_directory,
        call.destination,
        call.pipeline,
        engine=engine,
        limits=engine_limits(call.pipeline),
        choices=static_choices(call.pipeline) if call.pipeline.draft else (),
        sliding_window=load_target(call).sliding_window,
    )

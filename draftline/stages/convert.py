"""convert: the target checkpoint in TensorRT-LLM's checkpoint format, and those of the drafts inside its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from draftline.config import Pipeline
from draftline.stages.conversion import ConvertResult, say_dropped_tokens, say_notes, say_unused_heads
from draftline.stages.stage import Stage, StageCall
from draftline.stages.tensorrt_llm import checkpoint_inputs, is_tensorrt_llm


def run(call: StageCall) -> ConvertResult:
    """Write ``config.json``, ``rank0.safetensors`` and the tokenizer's files; those of draft I into ``draft-I/``.

    For TensorRT-LLM's own routes: what ``stages.tensorrt_llm`` says.
    """
    if is_tensorrt_llm(call.pipeline):
        from draftline.stages.tensorrt_llm import convert

        return convert(call)
    from draftline.checkpoints.convert import convert_checkpoint
    from draftline.checkpoints.drafts.convert import convert_head
    from draftline.checkpoints.drafts.description import describe_draft_model, describe_head
    from draftline.checkpoints.drafts.vocabulary import check_same_tokens
    from draftline.checkpoints.tokenizer import TOKENIZER_FILE
    from draftline.stages.drafts import draft_folder

    dtype = call.pipeline.target.dtype
    advances = _split_progress(call)
    target = convert_checkpoint(call.source, call.destination, dtype, advances[0])
    say_notes(call, "target", call.source)
    say_unused_heads(call)
    say_dropped_tokens(call, target.vocab_size)
    draft_layers = []
    for index, (draft, source) in enumerate(zip(call.pipeline.draft, call.draft_sources, strict=True)):
        destination, advance = call.destination / draft_folder(index), advances[index + 1]
        if source is None or draft.method == "ngram":
            draft_layers.append(0)
            continue
        if draft.method == "draft_model":
            model = convert_checkpoint(source, destination, dtype, advance)
            draft_layers.append(model.num_hidden_layers)
            say_notes(call, "draft_model", source)
            lines = describe_draft_model(model, target)
        else:
            head = convert_head(
                source, destination, draft.method, target, dtype, advance, captured_layers=draft.captured_layers
            )
            draft_layers.append(head.num_layers)
            lines = describe_head(head, target)
            if (source / TOKENIZER_FILE).is_file():  # published with some heads, and of no other use than this
                check_same_tokens(call.destination, source, target.vocab_size)
        for line in lines:
            call.say(f"{draft.method}: {line}")
    return ConvertResult(
        target.architecture,
        target.dtype,
        target.num_hidden_layers,
        target.hidden_size,
        target.vocab_size,
        tuple(draft_layers),
    )


def _split_progress(call: StageCall) -> list[Callable[[int, int], None]]:
    """Return the advance functions of the target and of each draft, which have the shares that their files have."""
    sizes = [_num_bytes(call.source), *(_num_bytes(source) if source else 0 for source in call.draft_sources)]

    def share(index: int) -> Callable[[int, int], None]:
        before = sum(sizes[:index])
        return lambda done, total: call.advance(before + sizes[index] * done // max(total, 1), sum(sizes))

    return [share(index) for index in range(len(sizes))]


def _num_bytes(source: Path) -> int:
    files = [source] if source.is_file() else [path for path in source.iterdir() if path.is_file()]
    return sum(path.stat().st_size for path in files)


def machine(pipeline: Pipeline) -> Mapping[str, str]:
    """Return no part of this machine: the settings that count for TensorRT-LLM's own routes alone."""
    return checkpoint_inputs(pipeline)


STAGE = Stage(
    name="convert",
    directory="checkpoint",
    run=run,
    settings=(
        "target.dtype",
        "draft.method",
        "draft.captured_layers",
        "engine.route",
        "engine.tensor_parallel_size",
        "engine.pipeline_parallel_size",
    ),
    packages=("numpy", "ml-dtypes", "tokenizers", "gguf"),
    modules=("draftline.stages.convert",),
    reads_source=True,
    machine=machine,
)

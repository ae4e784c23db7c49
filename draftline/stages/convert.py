"""convert: the target checkpoint in TensorRT-LLM's checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass

from draftline.stages.stage import Stage, StageCall


@dataclass(frozen=True)
class ConvertResult:
    architecture: str
    dtype: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


def run(call: StageCall) -> ConvertResult:
    """Write ``config.json``, ``rank0.safetensors`` and the tokenizer's files."""
    from draftline.checkpoints.convert import convert_checkpoint

    config = convert_checkpoint(call.source, call.destination, call.pipeline.target.dtype, call.advance)
    return ConvertResult(
        config.architecture, config.dtype, config.num_hidden_layers, config.hidden_size, config.vocab_size
    )


STAGE = Stage(
    name="convert",
    directory="checkpoint",
    run=run,
    settings=("target.dtype",),
    packages=("numpy", "ml-dtypes", "tokenizers", "gguf"),
    modules=("draftline.stages.convert",),
    reads_source=True,
)

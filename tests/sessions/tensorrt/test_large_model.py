"""A model of eight billion parameters: built with external weights in seconds and little memory, which reads none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.trtllm import write_checkpoint_config

LAYERS, HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 32, 4096, 14336, 128256, 32, 8, 128
QKV = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
SECONDS, BYTES = 60, 4 << 30  # of a CPU; resident

PROGRAM = """
import json, sys, time
from pathlib import Path
from draftline.sessions.tensorrt.engine_builder import PlanSettings, build_tensorrt_engine
from draftline.sessions.tensorrt import engine_builder
from draftline.sessions.tensorrt.profiles import StepLimits
from draftline.sessions.tensorrt.vendor import import_vendor
from tests.resident_memory import peak_bytes
from tests.sessions.tensorrt.plans import fake_kernels
engine_builder.compile_plugin_kernels = lambda shape, architectures, cache: fake_kernels(shape, architectures)
engine_builder.compile_commit_kernels = engine_builder.compile_plugin_kernels
checkpoint, destination = map(Path, sys.argv[1:])
settings = PlanSettings("float16", "float16", "float16", "external", (80, 86, 89, 120), checkpoint, checkpoint / "none")
build_tensorrt_engine(
    import_vendor("tensorrt_rtx"), checkpoint, destination, settings=settings,
    limits=StepLimits(16, 8192, 512, 16, 8192), prefix_cache=True, progress=lambda done, total: None,
)
print(json.dumps({"seconds": time.process_time(), "resident_bytes": peak_bytes()}))
"""


def write_sparse_checkpoint(directory: Path) -> None:
    """Write a converted checkpoint whose tensors are a hole in a file: 16 GB that take no disk."""
    directory.mkdir()
    config = CheckpointConfig(
        architecture="LlamaForCausalLM",
        dtype="float16",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        intermediate_size=INTERMEDIATE,
        norm_epsilon=1e-5,
        rotary_base=500000.0,
        max_position_embeddings=8192,
    )
    write_checkpoint_config(directory / "config.json", config)
    shapes: dict[str, tuple[int, ...]] = {"transformer.vocab_embedding.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"transformer.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.attention.qkv.weight": (QKV, HIDDEN),
            f"{prefix}.attention.dense.weight": (HIDDEN, HIDDEN),
            f"{prefix}.post_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.fc.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.gate.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes |= {"transformer.ln_f.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    header, position = {}, 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with (directory / "rank0.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)


def test_external_weights_are_not_read(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "engine").mkdir()
    arguments = [str(tmp_path / name) for name in ("checkpoint", "engine")]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["seconds"] < SECONDS
    assert measured["resident_bytes"] < BYTES
    assert (tmp_path / "engine" / "model.plan").stat().st_size < 64 << 20
    weights = json.loads((tmp_path / "engine" / "weights.json").read_text())["model.plan"]
    both = weights["transformer.layers.31.mlp.fc_gate.weight"]
    assert both["shape"] == [2 * INTERMEDIATE, HIDDEN]
    assert both["num_bytes"] == 2 * 2 * INTERMEDIATE * HIDDEN

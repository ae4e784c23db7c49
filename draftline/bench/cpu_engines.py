"""The engines that the CPU benchmark builds from one checkpoint, and what a step of them must read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from draftline.graphs.decoder import LOCAL_ROTARY, ROTARY
from draftline.sessions.engine_config import EngineConfig, PoolDtype
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_builder import MODEL_FILE, build_engine

Precision = Literal["float32", "int8"]
BLOCK_SIZE = 16
_SPARE = 1.25  # blocks that answers of a round fill and leave
_PREFILL_TOKENS = 512


@dataclass(frozen=True)
class EngineShape:
    """What an engine must hold: ``max_context_tokens`` of all sequences together, answers included."""

    max_batch_size: int
    max_seq_len: int
    max_context_tokens: int


def build_bench_engine(
    checkpoint: Path,
    directory: Path,
    precision: Precision,
    kernels: Kernels,
    shape: EngineShape,
    pool_dtype: PoolDtype = "float32",
) -> Path:
    """Build an engine into the new folder ``directory`` and return it."""
    directory.mkdir(parents=True)
    build_engine(
        checkpoint,
        directory,
        weights_dtype=precision,
        pool_dtype=pool_dtype,
        kernels=kernels,
        max_batch_size=shape.max_batch_size,
        max_seq_len=shape.max_seq_len,
        max_num_tokens=_PREFILL_TOKENS,
        num_threads=0,
        block_size=BLOCK_SIZE,
        max_blocks=int(_SPARE * shape.max_context_tokens / BLOCK_SIZE) + 2 * shape.max_batch_size,
        prefix_cache=True,
        progress=lambda done, total: None,
    )
    return directory


def count_weight_bytes(engine: Path) -> int:
    """Count what every step reads of an engine's weights: all but the rotary tables, and a table of embeddings that no
    product reads too."""
    graph = onnx.load(engine / MODEL_FILE, load_external_data=False).graph
    lookups = ("Gather", "QuantizedEmbedding")
    read = {name for node in graph.node if node.op_type not in lookups for name in node.input}
    read -= {*ROTARY, *LOCAL_ROTARY}
    return sum(_num_bytes(tensor) for tensor in graph.initializer if tensor.name in read)


def _num_bytes(tensor: onnx.TensorProto) -> int:
    lengths = [int(entry.value) for entry in tensor.external_data if entry.key == "length"]
    return lengths[0] if lengths else len(onnx.numpy_helper.to_array(tensor).tobytes())


def count_kv_bytes(config: EngineConfig) -> int:
    """Count the bytes of one token's keys and values in all layers."""
    model = config.model
    num_bytes = {"float32": 4, "float16": 2}[config.pool_dtype]
    return model.num_hidden_layers * 2 * model.num_key_value_heads * model.head_size * num_bytes

"""Build an engine for ONNX Runtime: ``model.onnx``, its weights, ``config.json``."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.safetensors_file import TensorEntry, map_tensor, tensor_locations, write_safetensors
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.graphs.onnx_graph import TensorLocation
from draftline.graphs.rotary import build_rotary_tables
from draftline.graphs.target import EMBEDDING, LM_HEAD, ROTARY_COSINES, ROTARY_SINES, build_target_graph
from draftline.graphs.tree_attention import inline_tree_attention
from draftline.quantization import quantize_int4_blocks, quantize_int8_blocks
from draftline.sessions.engine_config import EXACT, DraftConfig, DraftMethod, EngineConfig, write_engine_config
from draftline.speculation import Acceptance, TreeShape

CHECKPOINT_FILE, WEIGHTS_FILE, MODEL_FILE = "rank0.safetensors", "weights.safetensors", "model.onnx"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ONNX_TYPES = {"float32": TensorProto.FLOAT, "int8": TensorProto.INT8, "uint8": TensorProto.UINT8}


@dataclass(frozen=True)
class DraftSource:
    """A drafter to build: ``checkpoint`` is the folder of the converted checkpoint, None for ``ngram``."""

    method: DraftMethod
    checkpoint: Path | None = None


def build_engine(
    checkpoint: Path,
    destination: Path,
    *,
    weights_dtype: str,
    max_batch_size: int,
    max_seq_len: int,
    max_num_tokens: int,
    num_threads: int,
    block_size: int,
    max_blocks: int,
    prefix_cache: bool,
    progress: Callable[[int, int], None],
    drafts: Sequence[DraftSource] = (),
    tree: TreeShape | None = None,
    acceptance: Acceptance = EXACT,
) -> None:
    """Write the engine of a converted checkpoint into the existing folder ``destination``.

    A float32 checkpoint built with float32 weights is hard-linked beside the graph (copied across file systems), and
    the graph's initializers point into it. All other tensors go, quantised or cast, to ``weights.safetensors``.
    """
    config = load_checkpoint_config(checkpoint)
    source = checkpoint / CHECKPOINT_FILE
    in_place = weights_dtype == "float32" and config.dtype == "float32"
    entries = _rotary_entries(config, max_seq_len)
    if not in_place:
        entries += _weight_entries(source, config, weights_dtype)
    write_safetensors(destination / WEIGHTS_FILE, _report_progress(entries, progress))
    locations = _locations(destination / WEIGHTS_FILE)
    if in_place:
        _link(source, destination / CHECKPOINT_FILE)
        locations |= _join_fc_gate(_locations(destination / CHECKPOINT_FILE), config)
    model = inline_tree_attention(build_target_graph(config, locations, block_size))
    onnx.save(model, destination / MODEL_FILE)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, destination / name)
    write_engine_config(
        destination,
        EngineConfig(
            backend="onnxruntime",
            weights_dtype=weights_dtype,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max_num_tokens,
            num_threads=num_threads,
            block_size=block_size,
            max_blocks=max_blocks,
            prefix_cache=prefix_cache,
            model=config,
            drafts=tuple(DraftConfig(draft.method) for draft in drafts),
            tree=tree,
            acceptance=acceptance,
        ),
    )


def _link(source: Path, destination: Path) -> None:
    try:
        os.link(source, destination)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, destination)


def _locations(path: Path) -> dict[str, TensorLocation]:
    return {
        name: TensorLocation(path.name, tensor.byte_offset, tensor.num_bytes, ONNX_TYPES[tensor.dtype], tensor.shape)
        for name, tensor in tensor_locations(path).items()
    }


def _join_fc_gate(locations: Mapping[str, TensorLocation], config: CheckpointConfig) -> dict[str, TensorLocation]:
    """Span ``mlp.fc`` and ``mlp.gate``, which the converter writes side by side, with one initializer."""
    joined = dict(locations)
    for layer in range(config.num_hidden_layers):
        for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
            prefix = f"transformer.layers.{layer}.mlp"
            fc, gate = joined[f"{prefix}.fc.{kind}"], joined[f"{prefix}.gate.{kind}"]
            assert gate.offset == fc.offset + fc.num_bytes, "the converter writes mlp.gate right behind mlp.fc"
            shape = (fc.shape[0] + gate.shape[0], *fc.shape[1:])
            joined[f"{prefix}.fc_gate.{kind}"] = TensorLocation(
                fc.file, fc.offset, fc.num_bytes + gate.num_bytes, fc.onnx_type, shape
            )
    return joined


def _rotary_entries(config: CheckpointConfig, num_positions: int) -> list[TensorEntry]:
    tables = build_rotary_tables(
        config.head_size, config.rotary_base, config.rotary_scaling, config.max_position_embeddings, num_positions
    )
    return [_entry(name, table.copy) for name, table in zip((ROTARY_COSINES, ROTARY_SINES), tables, strict=True)]


def _entry(name: str, read: Callable[[], NDArray[Any]]) -> TensorEntry:
    value = read()
    return TensorEntry(name, str(value.dtype), value.shape, lambda: [read()])


def _weight_entries(source: Path, config: CheckpointConfig, weights_dtype: str) -> list[TensorEntry]:
    """Entries of every tensor in its engine form. Parts of one matrix stand together and are computed once."""
    tensors = tensor_locations(source)

    def read(*names: str) -> NDArray[np.float32]:
        parts = [map_tensor(source, tensors[name]).astype(np.float32) for name in names]
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    @functools.lru_cache(maxsize=1)
    def int8(names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
        return quantize_int8_blocks(read(*names))

    @functools.lru_cache(maxsize=1)
    def int4(names: tuple[str, ...]) -> tuple[NDArray[Any], ...]:
        return quantize_int4_blocks(read(*names))

    quantized = {"int8": (int8, ("int8", "scale")), "int4": (int4, ("int4", "scale", "zero"))}
    quantize_one_row = {"int8": quantize_int8_blocks, "int4": quantize_int4_blocks}

    def shape_of(names: tuple[str, ...]) -> tuple[int, int]:
        return sum(tensors[name].shape[0] for name in names), tensors[names[0]].shape[1]

    def matrix(name: str, sources: tuple[str, ...], dtype: str) -> Iterator[TensorEntry]:
        out, size = shape_of(sources)
        if dtype == "float32":
            yield TensorEntry(f"{name}.weight", "float32", (out, size), lambda: [read(*sources)])
        else:
            quantize, suffixes = quantized[dtype]
            shapes = [part.shape[1:] for part in quantize_one_row[dtype](np.zeros((1, size), np.float32))]
            for index, suffix in enumerate(suffixes):
                kind = "float32" if suffix == "scale" else "uint8"
                chunks = functools.partial(lambda part: [quantize(sources)[part]], index)
                yield TensorEntry(f"{name}.weight_{suffix}", kind, (out, *shapes[index]), chunks)

    def entries() -> Iterator[TensorEntry]:
        embedding, lm_head = (f"{EMBEDDING}.weight",), (f"{LM_HEAD}.weight",)
        # The two largest matrices stay int8 beside int4 layers: they carry most of the quality.
        outer_dtype = "int8" if weights_dtype == "int4" else weights_dtype
        yield from matrix(EMBEDDING, embedding, outer_dtype)
        if not config.share_embedding_table:
            yield from matrix(LM_HEAD, lm_head, outer_dtype)
        for name in tensors:
            if name in (*embedding, *lm_head) or ".mlp.gate." in name:
                continue
            sources = (name, name.replace(".mlp.fc.", ".mlp.gate.")) if ".mlp.fc." in name else (name,)
            stem, kind = name.replace(".mlp.fc.", ".mlp.fc_gate.").rsplit(".", 1)
            if kind == "weight" and len(tensors[name].shape) == 2:
                yield from matrix(stem, sources, weights_dtype)
            else:
                shape = (sum(tensors[part].shape[0] for part in sources),)
                chunks = functools.partial(lambda parts: [read(*parts)], sources)
                yield TensorEntry(f"{stem}.{kind}", "float32", shape, chunks)

    return list(entries())


def _report_progress(entries: list[TensorEntry], progress: Callable[[int, int], None]) -> list[TensorEntry]:
    def counted(index: int, entry: TensorEntry) -> TensorEntry:
        def chunks() -> Iterator[Any]:
            yield from entry.chunks()
            progress(index + 1, len(entries))

        return entry._replace(chunks=chunks)

    return [counted(index, entry) for index, entry in enumerate(entries)]

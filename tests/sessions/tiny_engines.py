"""Engines of tiny checkpoints, and steps written by hand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.convert import convert_checkpoint
from draftline.checkpoints.drafts import convert_head
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import TensorEntry, tensor_locations, write_safetensors
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE, load_checkpoint_config, write_checkpoint_config
from draftline.sessions.engine_config import DraftMethod, PoolDtype, load_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_builder import DraftSource, build_engine
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.protocol import StepBatch
from draftline.speculation import EXACT, Acceptance, TreeShape
from draftline.tree import build_tree_mask, chain_parents, pack_mask, position_offsets


def build_tiny_engine(
    directory: Path,
    checkpoint: Path,
    *,
    dtype: str = "float32",
    weights_dtype: str = "float32",
    pool_dtype: PoolDtype = "float32",
    kernels: Kernels = "native",
    max_batch_size: int = 16,
    max_seq_len: int = 256,
    max_num_tokens: int = 256,
    num_threads: int = 1,
    block_size: int = 16,
    max_blocks: int = 128,
    prefix_cache: bool = True,
    drafts: Sequence[tuple[DraftMethod, Path | None]] = (),
    tree: TreeShape | None = None,
    acceptance: Acceptance = EXACT,
    captured_layers: Sequence[int] | None = None,
    draft_weights_dtype: str | None = None,
    sinks: bool = False,
) -> Path:
    """Convert ``checkpoint`` and the published checkpoints of ``drafts``, and build their engine below ``directory``.

    ``sinks``: attention has random ones, which the published checkpoint has not.
    Returns the engine's folder.
    """
    converted, engine = directory / f"converted-{dtype}", directory / f"engine-{weights_dtype}-{num_threads}"
    if not converted.exists():
        convert_checkpoint(checkpoint, converted, dtype, lambda done, total: None)
        if sinks:
            add_sinks(converted)
    sources = [
        DraftSource(
            method,
            source and convert_tiny_draft(directory, method, source, converted, dtype),
            source and draft_weights_dtype,
        )
        for method, source in drafts
    ]
    engine.mkdir()
    build_engine(
        converted,
        engine,
        weights_dtype=weights_dtype,
        pool_dtype=pool_dtype,
        kernels=kernels,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        num_threads=num_threads,
        block_size=block_size,
        max_blocks=max_blocks,
        prefix_cache=prefix_cache,
        progress=lambda done, total: None,
        drafts=sources,
        tree=tree,
        acceptance=acceptance,
        captured_layers=captured_layers,
    )
    return engine


def add_sinks(converted: Path) -> None:
    """Give every layer of a converted checkpoint random sinks, about as large as scores."""
    config, random, file = load_checkpoint_config(converted), np.random.default_rng(0), converted / WEIGHTS_FILE
    whole = file.read_bytes()
    tensors = {
        name: TensorEntry(name, at.dtype, at.shape, partial(_part, whole, at.byte_offset, at.num_bytes))
        for name, at in tensor_locations(file).items()
    }
    for layer in range(config.num_hidden_layers):
        name = f"transformer.layers.{layer}.attention.sinks"
        sinks = random.normal(0, 2, config.num_attention_heads).astype(numpy_dtype(config.dtype)).tobytes()
        entry = TensorEntry(name, config.dtype, (config.num_attention_heads,), partial(_part, sinks, 0, len(sinks)))
        tensors[name] = entry
    write_safetensors(file, list(tensors.values()), {})
    write_checkpoint_config(converted / CONFIG_FILE, replace(config, attention_sinks=True))


def _part(whole: bytes, first: int, count: int) -> list[bytes]:
    return [whole[first : first + count]]


def convert_tiny_draft(directory: Path, method: DraftMethod, source: Path, target: Path, dtype: str) -> Path:
    """Convert the draft checkpoint ``source`` for the converted ``target`` below ``directory``, once."""
    destination = directory / f"converted-{method}-{source.name}-{dtype}"
    if destination.exists():
        return destination
    if method == "draft_model":
        convert_checkpoint(source, destination, dtype, lambda done, total: None)
    else:
        assert method != "ngram"
        convert_head(source, destination, method, load_checkpoint_config(target), dtype, lambda done, total: None)
    return destination


def open_tiny_session(engine: Path) -> OnnxRuntimeSession:
    return OnnxRuntimeSession(engine, load_engine_config(engine))


@dataclass
class Text:
    """A sequence: the blocks it owns and how many of its tokens are committed."""

    blocks: list[int]
    num_committed: int = 0

    def slots(self, first: int, count: int, block_size: int = 16) -> NDArray[np.int64]:
        positions = np.arange(first, first + count)
        slots: NDArray[np.int64] = (
            np.array(self.blocks, np.int64)[positions // block_size] * block_size + positions % block_size
        )
        return slots


def make_batch(
    texts: Sequence[Text], ids: Sequence[Sequence[int]], trees: Sequence[Sequence[int] | None] | None = None
) -> StepBatch:
    """Build a step of ``ids[b]`` behind what ``texts[b]`` has committed; every row is sampled, greedily.

    ``trees[b]`` gives the parents of sequence b, None = a chain; without ``trees`` the mask is left out.
    """
    lengths = [len(tokens) for tokens in ids]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_rows = int(starts[-1])
    shapes = [
        chain_parents(length) if tree is None else np.array(tree)
        for length, tree in zip(lengths, trees or [None] * len(ids), strict=True)
    ]
    mask = np.zeros((num_rows, -(-max(lengths) // 32)), np.int32)
    for first, parents in zip(starts, shapes, strict=False):
        packed = pack_mask(build_tree_mask(parents))
        mask[first : first + len(parents), : packed.shape[1]] = packed
    columns = max(1, max(len(text.blocks) for text in texts))
    table = np.full((len(texts), columns), -1, np.int32)
    for row, text in enumerate(texts):
        table[row, : len(text.blocks)] = text.blocks
    positions = [text.num_committed + position_offsets(tree) for text, tree in zip(texts, shapes, strict=True)]
    return StepBatch(
        input_ids=np.concatenate([np.array(tokens, np.int32) for tokens in ids]),
        position_ids=np.concatenate(positions).astype(np.int32),
        sequence_starts=starts,
        context_lengths=np.array([text.num_committed for text in texts], np.int32),
        block_table=table,
        sample_rows=np.arange(num_rows, dtype=np.int32),
        temperature=np.zeros(num_rows, np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        uniform=np.zeros(num_rows, np.float32),
        packed_mask=None if trees is None else mask,
    )


def run_text(
    session: OnnxRuntimeSession, text: Text, ids: Sequence[int], chunks: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """Run and commit ``ids`` behind ``text`` in chunks of the given lengths (one by default); logits of every row."""
    outputs, first = [], 0
    for count in chunks or [len(ids)]:
        outputs.append(session.forward_logits(make_batch([text], [ids[first : first + count]])))
        session.commit(np.arange(count), text.slots(text.num_committed, count))
        text.num_committed += count
        first += count
    assert first == len(ids)
    return np.concatenate(outputs)

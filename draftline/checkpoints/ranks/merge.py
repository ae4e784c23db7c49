"""Put the slices of all ranks together again, bit for bit: the reverse of ``split``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.converted import check_destination, num_converted_bytes, replace_directory
from draftline.checkpoints.huggingface import TOKENIZER_FILES
from draftline.checkpoints.names import TargetTensor
from draftline.checkpoints.ranks.config import load_layout, write_layout_config
from draftline.checkpoints.ranks.cuts import Band, cut_kind
from draftline.checkpoints.ranks.layout import Layout, check_architecture
from draftline.checkpoints.ranks.mapping import Mapping as RankMapping
from draftline.checkpoints.ranks.mapping import weights_file
from draftline.checkpoints.safetensors_file import (
    CHUNK_BYTES,
    TensorEntry,
    TensorLocation,
    read_chunks,
    tensor_locations,
    write_safetensors,
)
from draftline.checkpoints.trtllm import CONFIG_FILE
from draftline.errors import CheckpointError

_AGAIN = "convert the checkpoint again"


def merge_checkpoint(source: Path, destination: Path, progress: Callable[[int, int], None]) -> Layout:
    """Write the checkpoint in ``source``, of any number of ranks, for one rank into ``destination``.

    Zeros that fill up a vocabulary are left out. ``progress(done, total)`` is called in bytes written. A checkpoint
    that lies at ``destination`` is replaced.

    Raises:
        CheckpointError: ``source`` is no TensorRT-LLM checkpoint, is quantised, lacks a file or a tensor or has more,
            or ranks that should hold the same differ.
    """
    layout = load_layout(source)
    check_architecture(source, layout.config)
    check_destination(destination)
    tensors = layout.tensors()
    ranks = [tensor_locations(weights_file(source, rank)) for rank in range(layout.mapping.world_size)]
    _check(layout, source, tensors, ranks)
    whole = Layout(layout.config, RankMapping(), layout.speculation)
    num_bytes = num_converted_bytes(tensors, layout.config.dtype)
    done_bytes = 0

    def followed(tensor: TargetTensor) -> Iterator[NDArray[Any]]:
        nonlocal done_bytes
        for chunk in _chunks(layout, source, ranks, tensor):
            yield chunk
            done_bytes += chunk.nbytes
            progress(done_bytes, num_bytes)

    with replace_directory(destination) as directory:
        entries = [
            TensorEntry(tensor.key, layout.config.dtype, tensor.shape, partial(followed, tensor)) for tensor in tensors
        ]
        write_safetensors(weights_file(directory, 0), entries)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                (directory / name).write_bytes((source / name).read_bytes())
        write_layout_config(directory / CONFIG_FILE, whole)
    return whole


def _check(layout: Layout, source: Path, tensors: list[TargetTensor], ranks: list[dict[str, TensorLocation]]) -> None:
    """Check that every rank has exactly its tensors, in the right dtype and shapes."""
    wanted: list[dict[str, tuple[int, ...]]] = [{} for _ in ranks]
    for tensor in tensors:
        (stage, key), shape = layout.placed(tensor), layout.slice_of(tensor).shape
        for place in range(layout.mapping.tp_size):
            wanted[layout.mapping.rank(stage, place)][key] = shape
    for rank, (expected, found) in enumerate(zip(wanted, ranks, strict=True)):
        where = weights_file(source, rank)
        wrong = {"without": sorted(set(expected) - set(found)), "with": sorted(set(found) - set(expected))}
        if any(wrong.values()):
            got = " and ".join(f"{word} {', '.join(names)}" for word, names in wrong.items() if names)
            rule = f"the file holds the {len(expected)} tensors that {CONFIG_FILE} says and no others"
            raise CheckpointError(where, rule, got, _AGAIN)
        for key, shape in expected.items():
            if found[key].shape != shape or found[key].dtype != layout.config.dtype:
                got = f"{found[key].dtype} {list(found[key].shape)}"
                raise CheckpointError(where, f"{key} is {layout.config.dtype} {list(shape)}", got, _AGAIN)


def _chunks(
    layout: Layout, source: Path, ranks: list[dict[str, TensorLocation]], tensor: TargetTensor
) -> Iterator[NDArray[Any]]:
    """Yield the whole tensor's elements in row-major order."""
    stage, key = layout.placed(tensor)
    bands = layout.slice_of(tensor).bands

    def read(band: Band, start: int, stop: int) -> Iterator[NDArray[Any]]:
        """Yield rows ``start .. stop - 1`` of the whole tensor, as the band's rank has them."""
        rank = layout.mapping.rank(stage, band.place)
        location = _rows(ranks[rank][key], band.at + start - band.start, stop - start)
        return read_chunks(weights_file(source, rank), location)

    if cut_kind(tensor.key) == "columns":
        num_rows = max(1, CHUNK_BYTES * tensor.shape[0] // num_converted_bytes([tensor], layout.config.dtype))
        for start in range(0, tensor.shape[0], num_rows):
            stop = min(start + num_rows, tensor.shape[0])
            parts = [np.concatenate([part.copy() for part in read(band, start, stop)]) for band in bands]
            yield np.concatenate([part.reshape(stop - start, -1) for part in parts], axis=1).reshape(-1)
        return
    for (start, stop), same in _grouped(bands).items():
        _, *others = same
        copies = [read(band, start, stop) for band in others]
        for chunk in read(same[0], start, stop):
            for band, copied in zip(others, copies, strict=True):
                if not np.array_equal(next(copied).view(np.uint8), chunk.view(np.uint8)):
                    where = weights_file(source, layout.mapping.rank(stage, band.place))
                    first = layout.mapping.rank(stage, same[0].place)
                    raise CheckpointError(where, f"{key} holds what rank {first} holds", "other values", _AGAIN)
            yield chunk


def _grouped(bands: tuple[Band, ...]) -> Mapping[tuple[int, int], list[Band]]:
    """Return the bands by the rows that they hold: ranks that hold the same rows together."""
    found: dict[tuple[int, int], list[Band]] = {}
    for band in bands:
        found.setdefault((band.start, band.stop), []).append(band)
    return found


def _rows(location: TensorLocation, first: int, num_rows: int) -> TensorLocation:
    row_bytes = location.num_bytes // location.shape[0]
    shape = (num_rows, *location.shape[1:])
    return location._replace(
        shape=shape, byte_offset=location.byte_offset + first * row_bytes, num_bytes=num_rows * row_bytes
    )

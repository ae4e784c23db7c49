"""Divide a source checkpoint among ranks: every source tensor is read once, a chunk at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.converted import converted_chunks
from draftline.checkpoints.ranks.cuts import Slice
from draftline.checkpoints.ranks.layout import Layout
from draftline.checkpoints.ranks.mapping import weights_file
from draftline.checkpoints.ranks.rank_file import RankFile
from draftline.checkpoints.source_tensor import SourceTensor


@dataclass(frozen=True)
class _Use:
    """A source tensor's rows are the rows from ``first`` on of a whole tensor: of ``key`` on the ranks of ``stage``."""

    key: str
    stage: int
    slice: Slice
    first: int


def write_ranks(
    directory: Path, layout: Layout, sources: Mapping[str, SourceTensor], dtype: str, progress: Callable[[int], None]
) -> None:
    """Write ``rank0.safetensors`` .. into ``directory``; ``progress`` is called with the source's rows' bytes done.

    ``sources`` are those of ``layout.tensors()``, checked to be there in the right shapes.

    Raises:
        CheckpointError: a weight is not finite, or overflows ``dtype``.
    """
    mapping = layout.mapping
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(mapping.world_size)]
    uses: dict[str, list[_Use]] = {}
    for tensor in layout.tensors():
        (stage, key), piece = layout.placed(tensor), layout.slice_of(tensor)
        for place in range(mapping.tp_size):
            shapes[mapping.rank(stage, place)][key] = piece.shape
        first = 0
        for name, shape in tensor.sources:
            uses.setdefault(name, []).append(_Use(key, stage, piece, first))
            first += shape[0]
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(RankFile(weights_file(directory, rank), dtype, shapes[rank]))
            for rank in range(mapping.world_size)
        ]
        done_bytes = 0
        for name, where in uses.items():
            source = sources[name]
            width = source.shape[1] if len(source.shape) > 1 else 1
            row = 0
            for rows in whole_rows(converted_chunks(name, source, dtype), width):
                for use in where:
                    _write(files, layout, use, use.first + row, rows)
                row += len(rows)
                done_bytes += rows.nbytes
                progress(done_bytes)


def _write(files: list[RankFile], layout: Layout, use: _Use, start: int, rows: NDArray[Any]) -> None:
    """Write the whole tensor's rows from ``start`` on to every rank that holds a part of them."""
    for band in use.slice.bands:
        low, high = max(start, band.start), min(start + len(rows), band.stop)
        if low < high:
            file = files[layout.mapping.rank(use.stage, band.place)]
            file.write(use.key, band.at + low - band.start, rows[low - start : high - start, band.columns])


def whole_rows(chunks: Iterable[NDArray[Any]], width: int) -> Iterator[NDArray[Any]]:
    """Turn flat chunks of any sizes into matrices of ``width`` columns; each is valid until the next is asked for."""
    rest: NDArray[Any] | None = None
    for chunk in chunks:
        flat = chunk if rest is None or not rest.size else np.concatenate([rest, chunk])
        end = flat.size - flat.size % width
        if end:
            yield flat[:end].reshape(-1, width)
        rest = flat[end:].copy()
    assert rest is None or not rest.size, "a tensor has whole rows"

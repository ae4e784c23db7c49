"""Write a safetensors file in bands of rows, in any order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import lay_out


class RankFile:
    """A file of tensors of one dtype. What is never written is zero: the file is as long as it will be from the start.

    ``shapes`` gives the tensors in file order. A context manager: the file is on disk when the block ends.
    """

    def __init__(self, path: Path, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._item_bytes = numpy_dtype(dtype).itemsize
        header, offsets, num_bytes = lay_out({name: (dtype, shape) for name, shape in shapes.items()})
        self._offsets = offsets
        self._widths = {name: shape[1] if len(shape) > 1 else 1 for name, shape in shapes.items()}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self._write(header, 0)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, name: str, row: int, rows: NDArray[Any]) -> None:
        """Write ``rows [n, width]`` of the tensor ``name`` from ``row`` on."""
        assert rows.ndim == 2
        assert rows.shape[1] == self._widths[name], name
        offset = self._offsets[name] + row * self._widths[name] * self._item_bytes
        contiguous = rows if rows.flags.c_contiguous else rows.copy()
        self._write(contiguous.reshape(-1).view("u1").data, offset)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:
            num_written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[num_written:], offset + num_written

    def __enter__(self) -> RankFile:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

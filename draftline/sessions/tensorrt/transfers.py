"""Small arrays between host and GPU: those of a forward lie side by side, and one copy brings all of its inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.tensorrt.cuda_device import CudaDevice, Rows, aligned


class RowArray(NamedTuple):
    """An array in device memory, of rows of ``shape`` each."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows(self) -> Rows:
        return Rows(self.address, self.row_bytes)


class Inputs:
    """Room for the inputs that the host gives a plan, ``num_bytes`` at most, each aligned."""

    def __init__(self, device: CudaDevice, what: str, num_bytes: int) -> None:
        self._device = device
        self._address = device.allocate(f"{what}: inputs", num_bytes)
        self._staged = device.allocate_pinned(num_bytes)
        self._num_bytes = 0

    def stage(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, int]:
        """Write ``feeds`` to the host's side, in their order; return where each will be on the device."""
        self._device.wait_for(self._staged)
        offset, addresses = 0, {}
        for name, value in feeds.items():
            self._staged.bytes[offset : offset + value.nbytes] = np.ascontiguousarray(value).view(np.uint8).ravel()
            addresses[name] = self._address + offset
            offset += aligned(value.nbytes)
        self._num_bytes = offset
        return addresses

    def enqueue(self) -> None:
        """Enqueue the copy of what was staged last."""
        self._device.copy_in(self._address, self._staged, self._num_bytes)


class Results:
    """Room for the outputs that go to the host: the first rows of ``arrays``, ``max_rows`` at most."""

    def __init__(self, device: CudaDevice, arrays: Mapping[str, RowArray], max_rows: int) -> None:
        self._device, self._arrays = device, arrays
        num_bytes = sum(aligned(max_rows * array.row_bytes) for array in arrays.values())
        self._pinned = device.allocate_pinned(num_bytes)

    def enqueue(self, num_rows: int) -> None:
        """Enqueue the copies of ``num_rows`` rows of each."""
        for name, offset in self._offsets(num_rows).items():
            array = self._arrays[name]
            self._device.copy_out(self._pinned.address + offset, array.address, num_rows * array.row_bytes)

    def read(self, num_rows: int) -> dict[str, NDArray[Any]]:
        """Return them, after the stream is done; the next forward overwrites them."""
        results = {}
        for name, offset in self._offsets(num_rows).items():
            array = self._arrays[name]
            stored = self._pinned.bytes[offset : offset + num_rows * array.row_bytes]
            results[name] = stored.view(array.dtype).reshape(num_rows, *array.shape)
        return results

    def _offsets(self, num_rows: int) -> dict[str, int]:
        offset, offsets = 0, {}
        for name, array in self._arrays.items():
            offsets[name] = offset
            offset += aligned(num_rows * array.row_bytes)
        return offsets


class LogitsReader:
    """Copies rows of an array of float32 to the host, in memory that grows with what is asked for."""

    def __init__(self, device: CudaDevice, array: RowArray) -> None:
        assert array.dtype == np.float32
        self._device, self._array = device, array
        self._pinned = device.allocate_pinned(0)

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return rows ``[n, columns]``; the next call overwrites them."""
        width, count = self._array.row_bytes, len(rows)
        if len(self._pinned.bytes) < count * width:
            self._device.free_pinned(self._pinned)
            self._pinned = self._device.allocate_pinned((1 << (count - 1).bit_length()) * width)
        borders = [*np.flatnonzero(np.diff(rows, prepend=-2) != 1).tolist(), count]
        for first, end in itertools.pairwise(borders):
            source = self._array.address + int(rows[first]) * width
            self._device.copy_out(self._pinned.address + first * width, source, (end - first) * width)
        self._device.synchronize()
        return self._pinned.bytes[: count * width].view(np.float32).reshape(count, *self._array.shape)

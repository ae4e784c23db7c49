"""Memory of the pools: zeros in large pages where the system has them."""

from __future__ import annotations

import math
import mmap

import numpy as np
from numpy.typing import DTypeLike, NDArray

MIN_BYTES = 4 << 20  # below it a page of 2 MB or more is mostly waste


def allocate_pool(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
    """Return zeros ``[*shape]``, memory of which is taken when it is first written.

    Attention reads blocks of a few kilobytes in any order: with pages of 4 KB each costs a walk through the page table.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if num_bytes < MIN_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)

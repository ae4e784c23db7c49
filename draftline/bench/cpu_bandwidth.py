"""How fast this machine reads memory, with all its cores at once: what every decode step is bound by."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

NUM_BYTES = 2**29  # as much as the float32 weights of the demo, and more than caches hold
_NUM_PASSES = 5


class ReadBandwidth:
    """``memchr`` of the C library looks in vain for a byte, in one thread per core: it reads and does little else."""

    def __init__(self) -> None:
        self._num_threads = len(os.sched_getaffinity(0))
        self._memory = np.ones(NUM_BYTES, np.uint8)  # ones: pages of zeros may be one page
        self._memchr = ctypes.CDLL(None).memchr
        self._memchr.restype = ctypes.c_void_p
        self._memchr.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

    def measure(self) -> float:
        """Return bytes per second, the best of a few passes over 0.5 GiB."""
        size = NUM_BYTES // self._num_threads
        starts = [self._memory.ctypes.data + thread * size for thread in range(self._num_threads)]

        def read(start: int) -> None:
            assert self._memchr(start, 2, size) is None

        best = 0.0
        with ThreadPoolExecutor(self._num_threads) as threads:
            for _ in range(_NUM_PASSES):
                started = time.perf_counter()
                list(threads.map(read, starts))
                best = max(best, size * self._num_threads / (time.perf_counter() - started))
        return best

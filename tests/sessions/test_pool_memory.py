"""Memory of the pools."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from draftline.sessions.pool_memory import MIN_BYTES, allocate_pool

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("num_elements", [7, MIN_BYTES // 2, MIN_BYTES // 2 + 3])
def test_a_pool_is_zeros_that_can_be_written(num_elements: int) -> None:
    pool = allocate_pool((1, num_elements), np.float16)
    assert pool.shape == (1, num_elements)
    assert pool.dtype == np.float16
    assert not pool.any()
    pool[0, -1] = 1
    assert pool.sum() == 1


def test_systems_without_large_pages_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert allocate_pool((MIN_BYTES,), np.float32).sum() == 0


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="a system without transparent large pages")
def test_a_pool_lies_in_large_pages() -> None:
    pool = allocate_pool((8 * MIN_BYTES,), np.uint8)
    pool[:] = 1
    address = pool.ctypes.data
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, end = (int(x, 16) for x in area.split(" ", 1)[0].split("-"))
        if first <= address < end:
            assert re.search(r"^VmFlags:.* hg\b", area, re.MULTILINE), "large pages are asked for"
            return
    raise AssertionError("the pool is not mapped")

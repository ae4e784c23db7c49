"""Fixtures of the tests that compare sessions with torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def _one_torch_thread() -> Iterator[None]:
    """More threads than one only make tiny products slower."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

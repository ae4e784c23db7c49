"""Kernels that engines are built for, and one thread of torch for the tests that compare sessions with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from draftline.sessions.native_kernels import Kernels

KERNELS: tuple[Kernels, ...] = ("native", "onnxruntime")


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """What holds for a session holds with both."""
    chosen: Kernels = request.param
    return chosen


@pytest.fixture(scope="module")
def _one_torch_thread() -> Iterator[None]:
    """More threads than one only make tiny products slower."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""What needs a GPU: skipped, with the reason, on machines without one."""

from __future__ import annotations

import pytest

from draftline.sessions.tensorrt.cuda_driver import LIBRARY, load_driver


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if load_driver() is None:
        skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU: {LIBRARY} has no device here")
        for item in items:
            if "/tests/gpu/" in str(item.path):
                item.add_marker(skip)

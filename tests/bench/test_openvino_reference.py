"""OpenVINO computes what transformers computes from the same checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from draftline.bench.openvino_model import write_openvino_model
from draftline.bench.openvino_reference import OpenVinoReference
from draftline.bench.transformers_reference import TransformersReference
from draftline.checkpoints.convert import convert_checkpoint
from draftline.errors import DraftlineError, MissingPackageError
from tests.tiny_checkpoints import Architecture, write_tiny_checkpoint

pytest.importorskip("torch")
pytest.importorskip("transformers")

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5])


def convert(folder: Path, architecture: Architecture = "llama", tie: bool = False) -> Path:
    source = write_tiny_checkpoint(folder / "source", architecture, tie=tie, head_dim=32, rope_theta=5e4)
    (folder / "converted").mkdir()
    convert_checkpoint(source, folder / "converted", "float32", lambda done, total: None)
    return folder / "converted"


@pytest.mark.parametrize("tie", [False, True])
def test_float32_answers_are_those_of_transformers(tmp_path: Path, tie: bool) -> None:
    pytest.importorskip("openvino_genai")
    checkpoint = convert(tmp_path, tie=tie)
    write_openvino_model(checkpoint, tmp_path, int8=False)
    reference = OpenVinoReference(tmp_path, float32=True, num_threads=1, max_batch_size=2, cache_gib=1)
    timelines, answers = reference.generate(PROMPTS, 12)
    assert answers == TransformersReference(checkpoint).generate(PROMPTS, 12)
    for timeline in timelines:
        assert timeline.events[-1][1] == 12


def test_what_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DraftlineError, match="has no biases, norms of heads"):
        write_openvino_model(convert(tmp_path, "qwen2"), tmp_path, int8=False)


def test_without_openvino_the_cure_is_a_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'draftline\[openvino\]'"):
        write_openvino_model(convert(tmp_path), tmp_path, int8=False)

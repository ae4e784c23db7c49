"""The reference that is built from a converted checkpoint is the model that transformers loads from the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.bench.transformers_reference import ARCHITECTURES, TransformersReference
from draftline.checkpoints.convert import convert_checkpoint
from draftline.errors import CheckpointError, MissingPackageError
from tests.tiny_checkpoints import CLASS_NAMES, Architecture, write_tiny_checkpoint

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3])


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("architecture", [name for name, kind in CLASS_NAMES.items() if kind in ARCHITECTURES])
def test_logits_and_answers_are_the_originals(tmp_path: Path, architecture: Architecture, tie: bool) -> None:
    source = write_tiny_checkpoint(tmp_path / "source", architecture, tie=tie, head_dim=24, rope_theta=5e4)
    (tmp_path / "converted").mkdir()
    convert_checkpoint(source, tmp_path / "converted", "float32", lambda done, total: None)
    reference = TransformersReference(tmp_path / "converted")
    original = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([PROMPTS[0]])).logits[0].numpy()
    logits = reference.logits(PROMPTS[0])
    assert np.abs(logits - expected).max() < 1e-5
    steps: list[int] = []
    answers = reference.generate(PROMPTS, 6, lambda instant, count: steps.append(count))
    assert steps == [1, 2, 3, 4, 5, 6]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer == reference.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source", "gemma3")
    convert_checkpoint(source, tmp_path / "converted", "float32", lambda done, total: None)
    with pytest.raises(CheckpointError, match=r"the transformers reference is one of .* got Gemma3ForCausalLM"):
        TransformersReference(tmp_path / "converted")


def test_answers_from_kept_keys_and_values_are_the_same(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "source")
    (tmp_path / "converted").mkdir()
    convert_checkpoint(source, tmp_path / "converted", "float32", lambda done, total: None)
    reference = TransformersReference(tmp_path / "converted")
    prompts = [list(PROMPTS[0]), [7, *PROMPTS[0][1:]]]
    kept = [reference.prefill([*prompt, 5, 6]) for prompt in prompts]
    for _ in range(2):  # what is kept stays as it is
        joined = reference.join(kept, len(prompts[0]) - 1)
        assert reference.generate(prompts, 6, cache=joined) == reference.generate(prompts, 6)


def test_an_old_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")  # transformers replaces its module as it loads
    with pytest.raises(MissingPackageError, match=r"needs transformers >= 5; got 4\.57\.1; pip install"):
        TransformersReference(tmp_path)

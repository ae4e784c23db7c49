"""What the check stage reports of the real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.bench.transformers_reference import TransformersReference
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.stages.perplexity import log_softmax
from draftline.stages.perplexity_text import PASSAGES

pytestmark = pytest.mark.end_to_end


def perplexity(build: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((build / "check" / "report.json").read_text())["perplexity"]
    return report


def test_float32_has_the_perplexity_of_transformers(build_of: Callable[[str], Path]) -> None:
    checkpoint = build_of("float32") / "checkpoint"
    tokenizer, reference = load_tokenizer(checkpoint), TransformersReference(checkpoint)
    nll = []
    for passage in PASSAGES:
        ids = tokenizer.encode(passage)
        log_probs = log_softmax(reference.logits(ids)[:-1])
        nll += (-log_probs[np.arange(len(ids) - 1), ids[1:]]).tolist()
    report = perplexity(build_of("float32"))
    assert report["num_tokens"] == len(nll) > 1000
    assert report["nll"] == pytest.approx(np.mean(nll), abs=2e-4)


def test_int8_costs_less_than_one_percent(build_of: Callable[[str], Path]) -> None:
    report = perplexity(build_of("int8"))
    assert report["float32"]["nll"] == pytest.approx(perplexity(build_of("float32"))["nll"], abs=1e-4)
    assert report["perplexity"] < 1.01 * report["float32"]["perplexity"]
    assert report["float32"]["same_greedy_tokens"] > 0.95

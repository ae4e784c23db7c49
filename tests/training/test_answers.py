"""The target answers prompts, and its answers and features are kept: the same ones whatever is killed."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.generation import load_engine
from draftline.runtime.request import SamplingParameters
from draftline.training.answers import AnswersSummary, answer_prompts
from draftline.training.examples import Examples, open_examples
from draftline.training.turns import Turns, derive_seed
from tests.sessions.draft_references import TargetReference
from tests.sessions.tiny_engines import build_tiny_engine
from tests.training.answering import describe_tiny, make_prompts, write_converted_target

MANY = 10**9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_converted_target(tmp_path_factory.mktemp("answers"))


def by_name(examples: Examples) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return tokens, masks and features of every sequence."""
    starts = examples.sequence_starts.tolist()
    return {
        name: tuple(array[start:end].tobytes() for array in (examples.token_ids, examples.is_answer, examples.features))
        for name, start, end in zip(examples.names, starts[:-1], starts[1:], strict=True)
    }


def test_answers_are_those_of_any_engine_and_features_those_of_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    """More prompts than places, longer than a step: chunks, and places that are taken again."""
    prompts = make_prompts(24)
    description = describe_tiny(checkpoint)
    summary = answer_prompts(
        prompts, checkpoint, tmp_path / "data", description, num_answer_tokens=MANY, max_repeats=1, max_batch_size=4
    )
    examples = open_examples(tmp_path / "data")
    assert sorted(examples.names) == sorted(prompt.name for prompt in prompts)
    tokenizer = load_tokenizer(checkpoint)
    turns = Turns(tokenizer)
    with load_engine(build_tiny_engine(tmp_path, checkpoint.parent / "target")) as loaded:
        sampling = [SamplingParameters(0.8, seed=derive_seed(5, prompt.name)) for prompt in prompts]
        asked = [turns.asking(prompt.text) for prompt in prompts]
        answers = loaded.generate(asked, 24, sampling)
    reference = TargetReference(checkpoint.parent / "target")
    starts = dict(zip(examples.names, itertools.pairwise(examples.sequence_starts), strict=True))
    num_ends = 0
    for prompt, prompt_ids, answer in zip(prompts, asked, answers, strict=True):
        rows = slice(*starts[prompt.name])
        ended = [2] if answer.finish_reason == "end_id" else []
        num_ends += len(ended)
        token_ids = [*prompt_ids, *answer.token_ids, *ended]
        assert examples.token_ids[rows].tolist() == token_ids
        is_answer = [False] * len(prompt_ids) + [True] * (len(answer.token_ids) + len(ended))
        assert examples.is_answer[rows].tolist() == is_answer
        hidden = reference.hidden(token_ids[:-1])
        expected = np.concatenate([hidden[1], hidden[2], hidden[-1]], axis=-1)
        found = examples.features[rows]
        np.testing.assert_allclose(found[:-1], expected, rtol=1e-3, atol=1e-3)
        assert not found[-1].any()
    assert num_ends > 0
    assert summary == AnswersSummary(
        24, len(examples.token_ids), int(examples.is_answer.sum()), {}, int(examples.is_answer.sum()), summary.seconds
    )
    assert not (tmp_path / "data" / "engine").exists()

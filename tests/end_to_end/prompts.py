"""Prompts of many kinds for SmolLM2."""

from __future__ import annotations

from collections.abc import Callable

_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    _CHAT.format("Why is the sky blue?"),
    _CHAT.format("Write a haiku about the sea."),
    "日本の首都は",
    "I love pizza 🍕 and",
    "La tour Eiffel se trouve à",
    "SELECT name, price FROM products WHERE",
    "a",
    "\n\n",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    "Q: What is 17 + 25?\nA:",
    "THE QUICK BROWN FOX",
    "Ingredients:\n- 2 cups of flour\n- 1 cup of sugar\n-",
    _CHAT.format("Translate to German: good morning, my friends."),
    "In 1969, the crew of Apollo 11 landed on the Moon. " * 6,
    "   def   spaced ( out ) :",
)

NUM_LONG_PROMPT_TOKENS = 4000


def write_long_prompt(count_tokens: Callable[[str], int]) -> str:
    """Write a text of exactly 4,000 tokens that does not repeat itself."""
    text = "A ledger of many entries."
    entry = 0
    while count_tokens(longer := f"{text} Entry {entry}: paid {entry * 37 % 101} to {entry * 11 % 89}.") < (
        NUM_LONG_PROMPT_TOKENS
    ):
        text, entry = longer, entry + 1
    while count_tokens(text) < NUM_LONG_PROMPT_TOKENS:
        text += " the"
    assert count_tokens(text) == NUM_LONG_PROMPT_TOKENS
    return text

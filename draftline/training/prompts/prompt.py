"""What the target is asked when it writes answers to train on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """``name`` is unique and stays the same from run to run: ``"lm-eval/gsm8k/3"``.

    ``text`` is the user's turn, without the chat template. Empty for the source ``own``: the target writes the user's
    turn itself.
    """

    name: str
    text: str

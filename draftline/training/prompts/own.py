"""The source ``own``: the target writes the user's turn itself, from nothing but the chat template's opening of it.

Source: Xu et al., "Magpie", 2024 (arXiv 2406.08464), section 2.1.
"""

from __future__ import annotations

from draftline.training.prompts.prompt import Prompt

NUM_PROMPTS = 6000  # they differ by the seed that their names give them


def own_prompts() -> list[Prompt]:
    """Return prompts without a text."""
    return [Prompt(f"own/{number}", "") for number in range(NUM_PROMPTS)]

"""The source ``topics``: everyday requests, each about every topic of its kind (``topics.yaml``)."""

from __future__ import annotations

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.resources import load_table


def topic_prompts() -> list[Prompt]:
    """Return every request of a kind with every topic of the kind."""
    table = load_table("topics.yaml")
    return [
        Prompt(f"topics/{kind}/{number}/{place}", _fill(request, topic))
        for kind, topics in table["topics"].items()
        for number, request in enumerate(table["requests"][kind])
        for place, topic in enumerate(topics)
    ]


def _fill(request: str, topic: str) -> str:
    """Put the topic in its place, with a capital letter where a sentence begins with it."""
    text = request.replace("{topic}", topic)
    return text[0].upper() + text[1:]

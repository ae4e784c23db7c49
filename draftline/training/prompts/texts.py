"""The source ``text``: passages to go on with, to summarise, to rewrite. They are of Python's documentation."""

from __future__ import annotations

import pydoc_data.topics
import re

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.standard_library import documented_modules

_MIN_WORDS, _MAX_WORDS = 40, 160
_MAX_PASSAGES = 4  # of one text
_REQUESTS = (
    "Continue this text:\n\n{passage}",
    "Summarise the following text in two sentences.\n\n{passage}",
    "Rewrite this passage so that a beginner understands it:\n\n{passage}",
    "What are the key points of this text? Answer as a list.\n\n{passage}",
    "Ask five questions that the following passage answers, and answer them.\n\n{passage}",
    "{passage}\n\nGive this passage a title, and explain its most difficult word.",
)


def text_prompts() -> list[Prompt]:
    """Return one request about each passage; the requests take turns."""
    texts = {f"module/{module.name}": module.description for module in documented_modules()}
    texts |= {f"topic/{topic}": text for topic, text in sorted(pydoc_data.topics.topics.items())}
    passages = [
        (f"text/{name}/{place}", passage)
        for name, text in texts.items()
        for place, passage in enumerate(passages_of(text)[:_MAX_PASSAGES])
    ]
    return [
        Prompt(name, _REQUESTS[number % len(_REQUESTS)].format(passage=passage))
        for number, (name, passage) in enumerate(passages)
    ]


def passages_of(text: str) -> list[str]:
    """Join paragraphs of prose, in their order, to passages; what is too short, too long or no prose is left out.

    >>> passages_of("Too short.\\n\\n" + "word " * 50)[0][:9], len(passages_of("    indented code"))
    ('word word', 0)
    """
    passages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        is_prose = paragraph[:1].isalpha() and "==" not in paragraph and paragraph.count("\n") * 5 < len(words)
        if is_prose and _MIN_WORDS <= len(words) <= _MAX_WORDS:
            passages.append(" ".join(words))
    return passages

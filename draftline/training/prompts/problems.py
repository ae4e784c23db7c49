"""The source ``problems``: mathematics, reasoning, extraction and editing, with drawn numbers and names."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.resources import load_table

_FILLINGS = 24  # of every request
_FIELD = re.compile(r"\{([a-z]+)\d*\}")


def problem_prompts() -> list[Prompt]:
    """Return the requests of ``problems.yaml``, each filled in some ways: the same ones in every run."""
    table = load_table("problems.yaml")
    return [
        Prompt(f"problems/{number}/{filling}", _fill(request, table["fields"], random.Random(f"{number}/{filling}")))
        for number, request in enumerate(table["requests"])
        for filling in range(_FILLINGS)
    ]


def _fill(request: str, fields: Mapping[str, Sequence[object]], draws: random.Random) -> str:
    """Fill the fields of a request; two fields of one kind get two entries."""
    names = dict.fromkeys(match.group(0) for match in _FIELD.finditer(request))
    left = {kind: draws.sample(entries, len(entries)) for kind, entries in fields.items()}
    values = {name: str(left[name.strip("{}0123456789")].pop()) for name in names}
    return _FIELD.sub(lambda match: values[match.group(0)], request)

"""The page of targets names what the tables of architectures hold."""

from __future__ import annotations

import re
from pathlib import Path

from draftline.checkpoints.families import FAMILIES
from draftline.checkpoints.refused_architectures import REASONS

PAGE = (Path(__file__).parents[1] / "docs" / "targets.md").read_text(encoding="utf-8")
COMPUTED, REFUSED = PAGE.split("## What is refused")


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+For\w+)`", text))


def test_every_architecture_that_is_computed_has_a_row() -> None:
    assert names(COMPUTED) == set(FAMILIES)


def test_what_is_refused_is_in_the_table_of_reasons() -> None:
    assert names(REFUSED) < set(REASONS)
    assert REASONS.keys().isdisjoint(FAMILIES)

"""What a rule that ties fields of a pipeline together is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """``holds`` is asked with the values of ``fields``, the first of which is to blame; texts may name values.

    A rule to blame on a field of ``draft`` is asked for each draft of a list; ``draft.earlier_methods`` are those
    before it. ``draft.methods`` are those of all drafts.
    """

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    rule: str
    cure: str

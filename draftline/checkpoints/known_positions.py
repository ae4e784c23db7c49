"""How many positions a model knows."""

from __future__ import annotations

from typing import Any

SCALED_PAST_THE_TABLE = frozenset({"linear", "dynamic", "yarn"})  # llama3 states the extended length already


def known_positions(max_position_embeddings: int, rotary_scaling: dict[str, Any] | None) -> int:
    """Return the positions that a model was trained for, extended by its rotary scaling.

    >>> known_positions(512, {"rope_type": "linear", "factor": 4.0})
    2048
    """
    scaling = rotary_scaling or {}
    if scaling.get("rope_type") not in SCALED_PAST_THE_TABLE:
        return max_position_embeddings
    original = scaling.get("original_max_position_embeddings", max_position_embeddings)
    return max(max_position_embeddings, int(original * scaling["factor"]))

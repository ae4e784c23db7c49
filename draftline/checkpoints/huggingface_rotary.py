"""The rotary part of Hugging Face's ``config.json``, in its old and its new spelling.

Source: ``modeling_rope_utils.py`` of transformers 5, and the configuration classes that add to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftline.checkpoints.families import Family
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

# rope_type -> (required numbers, optional keys). `original_max_position_embeddings` is filled in for the types that use
# it, as transformers does. longrope has lists of numbers beside these, one for each pair of elements that turns.
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ("original_max_position_embeddings",)),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("original_max_position_embeddings",), ("factor", "attention_factor")),
}
LONGROPE_FACTORS = ("short_factor", "long_factor")
NEEDS_ORIGINAL_LENGTH = ("llama3", "yarn")
ORIGINAL_LENGTH = "original_max_position_embeddings"


class RotaryConfig(NamedTuple):
    """Fields of ``CheckpointConfig`` without their prefix."""

    base: float
    scaling: dict[str, Any] | None
    fraction: float
    local_base: float | None


def parse_rotary(config: JsonObject, family: Family, head_size: int, *, has_windows: bool) -> RotaryConfig:
    """Return what ``config.json`` says of rotary embeddings; ``has_windows``: whether some layers have a window.

    Raises: CheckpointError for values that are missing or wrong, and for what the tables cannot express.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise config.error("rope_scaling", "an object", given)
    if family.rope_required and not given:
        raise config.error("rope_scaling", f"stated of a {family.model_type}, whose class scales by default", None)
    local: Mapping[str, Any] = {}
    if any(isinstance(value, Mapping) for value in given.values()):
        if family.local_rotary_base is None or not {"full_attention", "sliding_attention"}.issuperset(given):
            raise config.error("rope_parameters", "one mapping for all layers", given, "choose a supported model")
        given, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    parameters = JsonObject(config.where, {key: value for key, value in given.items() if value is not None})
    fraction = _fraction(config, parameters, family, head_size)
    base = parameters.number("rope_theta", config.number("rope_theta", family.rotary_base))
    scaling = _scaling(config, parameters, family, int(head_size * fraction) // 2)
    return RotaryConfig(base, scaling, fraction, _local_base(config, local, family) if has_windows else None)


def _local_base(config: JsonObject, given: Mapping[str, Any], family: Family) -> float | None:
    if family.local_rotary_base is None:
        return None
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind != "default":
        raise config.error("rope_parameters.sliding_attention.rope_type", '"default"', kind, "choose another model")
    base = config.number("rope_local_base_freq", family.local_rotary_base)
    return JsonObject(config.where, given).number("rope_theta", base)


def _fraction(config: JsonObject, parameters: JsonObject, family: Family, head_size: int) -> float:
    key = "partial_rotary_factor"
    fraction = parameters.number(key, config.number(key, 1.0))
    if fraction == 1.0:
        return fraction
    if not family.partial_rotary or fraction > 1.0:
        raise config.error(key, "1" if not family.partial_rotary else "1 or less", fraction, "choose another model")
    size = int(head_size * fraction)
    if size % 2 or not size:
        raise config.error(key, f"a share of head_dim ({head_size}) that is even", fraction)
    return fraction


def _scaling(config: JsonObject, parameters: JsonObject, family: Family, num_pairs: int) -> dict[str, Any] | None:
    """Return the mapping of scaling, None of the type ``default``."""
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = dict(family.rope_aliases).get(named, named)
    if rope_type == "default":
        return None
    if rope_type not in ROPE_TYPES:
        raise config.error("rope_type", f"one of default, {', '.join(ROPE_TYPES)}", rope_type, "choose another model")
    required, optional = ROPE_TYPES[rope_type]
    scaling: dict[str, Any] = {"rope_type": rope_type}
    for key in required:
        scaling[key] = _required(config, parameters, rope_type, key)
    for key in optional:
        if parameters.get(key) is not None:
            scaling[key] = parameters.flag(key) if key == "truncate" else parameters.number(key)
    lists = LONGROPE_FACTORS if rope_type == "longrope" else ()
    for key in lists:
        scaling[key] = parameters.numbers(key, num_pairs)
    known = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *required, *optional, *lists}
    unknown = sorted(set(parameters.values) - known)
    if unknown:
        got = f"unknown keys {', '.join(unknown)}"
        raise CheckpointError(config.where, f"rope_scaling of type {rope_type} has known keys", got, "remove the keys")
    return scaling


def _required(config: JsonObject, parameters: JsonObject, rope_type: str, key: str) -> float:
    if rope_type == "longrope" and config.get(ORIGINAL_LENGTH) is not None:
        return config.number(ORIGINAL_LENGTH)  # where Phi-3 has it; it goes before that of the mapping
    fallback = config.number("max_position_embeddings") if rope_type in NEEDS_ORIGINAL_LENGTH else None
    return parameters.number(key, fallback if key == ORIGINAL_LENGTH else None)

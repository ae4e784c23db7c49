"""Write and read the ``config.json`` of a converted head."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, cast, get_args

from draftline.checkpoints.draft_config import FeatureNorm, HeadConfig, HeadMethod
from draftline.checkpoints.dtypes import EXPONENT_BITS
from draftline.checkpoints.huggingface_rotary import ROPE_TYPES
from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.checkpoints.trtllm import CONFIG_FILE, WEIGHTS_FILE
from draftline.errors import CheckpointError

_AGAIN = "convert the draft checkpoint again"


def write_head_config(path: Path, config: HeadConfig) -> None:
    """Write ``config.json``; the file appears under its name only when it is whole."""
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_head_config(directory: Path) -> HeadConfig:
    """Read the ``config.json`` of a converted head.

    Raises:
        CheckpointError: the folder is not a converted head, or a key is missing, unknown or of the wrong type.
    """
    raw = load_json(directory / CONFIG_FILE)
    if not (directory / WEIGHTS_FILE).is_file():
        raise CheckpointError(directory, f"a converted head holds {WEIGHTS_FILE}", "no such file", _AGAIN)
    keys = {field.name for field in dataclasses.fields(HeadConfig)}
    if wrong := sorted(keys ^ set(raw.values)):
        rule = "the file has the keys of a converted head and no others"
        raise CheckpointError(raw.where, rule, f"missing or unknown {', '.join(wrong)}", _AGAIN)
    for key, allowed in (
        ("method", get_args(HeadMethod)),
        ("dtype", tuple(EXPONENT_BITS)),
        ("feature_norm", get_args(FeatureNorm)),
    ):
        if raw.text(key) not in allowed:
            raise raw.error(key, f"one of {', '.join(allowed)}", raw.get(key), _AGAIN)
    scaling = raw.get("rotary_scaling")
    if scaling is not None and not (isinstance(scaling, dict) and scaling.get("rope_type") in ROPE_TYPES):
        raise raw.error("rotary_scaling", f"null or of a rope_type among {', '.join(ROPE_TYPES)}", scaling, _AGAIN)

    def count(key: str) -> int:
        value: Any = raw.get(key)
        if type(value) is not int or value < 0:
            raise raw.error(key, "a count", value, _AGAIN)
        return value

    return HeadConfig(
        method=cast(HeadMethod, raw.text("method")),
        dtype=raw.text("dtype"),
        vocab_size=raw.integer("vocab_size"),
        hidden_size=raw.integer("hidden_size"),
        target_hidden_size=raw.integer("target_hidden_size"),
        num_layers=raw.integer("num_layers"),
        num_heads=count("num_heads"),
        draft_vocab_size=count("draft_vocab_size"),
        captured_layers=raw.integers("captured_layers"),
        captured_layer_readings=_readings(raw),
        num_attention_heads=count("num_attention_heads"),
        num_key_value_heads=count("num_key_value_heads"),
        head_size=count("head_size"),
        intermediate_size=count("intermediate_size"),
        norm_epsilon=raw.number("norm_epsilon"),
        rotary_base=raw.number("rotary_base"),
        rotary_scaling=scaling,
        max_position_embeddings=count("max_position_embeddings"),
        fc_bias=raw.flag("fc_bias"),
        qkv_bias=raw.flag("qkv_bias"),
        dense_bias=raw.flag("dense_bias"),
        mlp_bias=raw.flag("mlp_bias"),
        qk_norm=raw.flag("qk_norm"),
        feature_norm=cast(FeatureNorm, raw.text("feature_norm")),
        norm_before_residual=raw.flag("norm_before_residual"),
        feeds_normed=raw.flag("feeds_normed"),
        owns_embedding=raw.flag("owns_embedding"),
        owns_lm_head=raw.flag("owns_lm_head"),
        owns_medusa_biases=raw.flag("owns_medusa_biases"),
        owns_medusa_lm_heads=raw.flag("owns_medusa_lm_heads"),
        layout=raw.text("layout"),
        notes=_notes(raw),
    )


def _readings(raw: JsonObject) -> tuple[tuple[int, ...], ...]:
    values = raw.get("captured_layer_readings")
    if not isinstance(values, list):
        raise raw.error("captured_layer_readings", "a list of lists of layers", values, _AGAIN)
    return tuple(
        JsonObject(raw.where, {"captured_layer_readings": value}).integers("captured_layer_readings")
        for value in values
    )


def _notes(raw: JsonObject) -> tuple[str, ...]:
    values = raw.get("notes")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise raw.error("notes", "a list of strings", values, _AGAIN)
    return tuple(values)

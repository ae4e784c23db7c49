"""Where a checkpoint says how it is quantised.

Source: the files that AutoGPTQ, AutoAWQ and ModelOpt write beside ``config.json``.
"""

from __future__ import annotations

from pathlib import Path

from draftline.checkpoints.json_object import JsonObject, load_json
from draftline.errors import CheckpointError

IN_CONFIG = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
# Of tools that wrote nothing into config.json, in the versions that did not: file -> method, and a key that tells it.
OWN_FILES = {
    MODELOPT_FILE: ("modelopt", "quant_algo"),
    "quantize_config.json": ("gptq", "bits"),
    "quant_config.json": ("awq", "w_bit"),
}


def find_quantization(directory: Path, config: JsonObject) -> JsonObject | None:
    """Return what ``config.json``, or a tool's own file beside it, says; None for a checkpoint that is not quantised.

    Raises: CheckpointError where two of them contradict each other.
    """
    found = next((section for key in IN_CONFIG if (section := config.section(key)) is not None), None)
    for name, (method, key) in OWN_FILES.items():
        if not (directory / name).is_file() or (found is not None and name != MODELOPT_FILE):
            continue
        file = load_json(directory / name)
        file = file.section("quantization") or file
        if file.get(key) is None and found is None:
            continue  # of keys and values alone, or another tool's file
        own = JsonObject(file.where, {**file.values, "quant_method": method}, file.prefix)
        inside = own if found is None else found.section("quantization") or found
        if inside.get(key) != own.get(key):
            rule = f"{config.where.name} and {name} name one {key}"
            cure = "correct them or fetch the checkpoint again"
            raise CheckpointError(directory, rule, f"{inside.get(key)} and {own.get(key)}", cure)
        return own
    return found

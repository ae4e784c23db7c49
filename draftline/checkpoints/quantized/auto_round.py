"""AutoRound's checkpoints, where they are packed as GPTQ's or AWQ's.

Source: vLLM's ``AutoRoundConfig``, which reads the same two packings as those methods' tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.quantized.awq import awq_layout
from draftline.checkpoints.quantized.gptq import gptq_layout
from draftline.checkpoints.quantized.layout import Layout
from draftline.checkpoints.quantized.parts import USE_ORIGINAL

PACKINGS: dict[str, Callable[[JsonObject], Layout]] = {
    "auto_round:auto_gptq": gptq_layout,
    "auto_round:auto_awq": awq_layout,
}
UNQUANTISED_BITS = 16  # and more: of a layer in extra_config that stays as it is


def auto_round_layout(config: JsonObject) -> Layout:
    """Read the configuration. Raises: CheckpointError where the packing, or what is packed, is another."""
    if config.get("data_type") not in (None, "int"):
        raise config.error("data_type", '"int"', config.get("data_type"), USE_ORIGINAL)
    packing = config.get("packing_format")
    if packing not in PACKINGS:
        raise config.error("packing_format", f"one of {', '.join(PACKINGS)}", packing, USE_ORIGINAL)
    layers = config.section("extra_config") or JsonObject(config.where, {})
    stated = [layers.section(name) or layers for name in layers.values]
    varies = any(layer.integer("bits", 1) < UNQUANTISED_BITS for layer in stated)
    layout = PACKINGS[packing](JsonObject(config.where, {**config.values, "dynamic": varies}, config.prefix))
    return replace(layout, title=f"AutoRound, as {layout.title}")

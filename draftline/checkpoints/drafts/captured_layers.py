"""Which layers of the target feed an EAGLE-3 head.

Ids in published configurations follow two conventions that differ by one, and a wrong guess costs acceptance in
silence: an id names the layer whose *output* the head reads (SpecForge, ModelOpt, SGLang), or the one whose *input* it
reads (speculators, vLLM). Here, and in converted heads, ids name outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.target_sizes import TargetSizes
from draftline.errors import CheckpointError

_IDS = "eagle_aux_hidden_state_layer_ids"
_CHOOSE = "choose the head that was trained for this target"

# Switches of ModelOpt's eagle_config -> the value that is the network of the reference. None = it changes nothing here.
_SWITCHES: dict[str, object] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,  # of heads that parallel_draft_step 1 does not have
}


class CapturedLayers(NamedTuple):
    """``layers``: 0-based, whose outputs are joined for ``fc``, lowest first. ``readings``: what else the source may
    mean, ``layers`` first; empty where it is clear. ``note`` says which it is and why."""

    layers: tuple[int, ...]
    readings: tuple[tuple[int, ...], ...]
    note: str


def default_layers(num_layers: int) -> tuple[int, ...] | None:
    """Return the layers of the reference for a target of ``num_layers``; None where they would not be three.

    All conventions mean these layers where they name none: outputs of 1, n // 2 - 1, n - 4 are inputs of the next ones.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    return layers if _are_increasing(layers) else None


def parse_captured_layers(
    raw: JsonObject,
    target: TargetSizes,
    fc_columns: int | None,
    ids_name: Literal["outputs", "inputs"] = "outputs",
    stated: Sequence[int] | None = None,
) -> CapturedLayers:
    """Read the layers that are captured; ``ids_name`` says what ids mean in the layout of the checkpoint.

    ``stated``: by somebody who knows, over what the checkpoint says.

    ``fc_columns`` is the width of ``fc.weight``, None where the tensor is absent (an error that is found elsewhere).

    Raises:
        CheckpointError: ``fc`` is not as wide as the layers are, or ids are wrong or wanting.
    """
    num_layers, hidden = target.num_hidden_layers, target.hidden_size
    if fc_columns is not None and (fc_columns == 0 or fc_columns % hidden):
        rule = f"fc.weight has a multiple of the target's hidden_size ({hidden}) columns"
        raise CheckpointError(raw.where, rule, fc_columns, _CHOOSE)
    default, ids = default_layers(num_layers), written_ids(raw)
    if stated is not None:
        return _stated(raw, tuple(stated), num_layers, hidden, fc_columns, ids)
    if ids is None:
        num_features = 3 if fc_columns is None else fc_columns // hidden
        if num_features != 3 or default is None:
            rule = f"config.json names the target's layers in {_IDS}"
            got = f"no such key, {num_features} features and a target of {num_layers} layers"
            raise CheckpointError(
                raw.where, rule, got, "set draft.captured_layers to the 0-based layers whose outputs the head reads"
            )
        readings = (default, *(shifted for by in (1, -1) if (shifted := shifted_layers(default, by, num_layers))))
        return CapturedLayers(default, readings, f"no {_IDS}: the reference's layers, outputs of {list(default)}")
    if not _are_increasing(ids) or ids[-1] > num_layers:
        raise raw.error(_IDS, f"increasing ids of the target's layers, below {num_layers}", list(ids))
    if fc_columns is not None and fc_columns != len(ids) * hidden:
        rule = f"fc.weight has {len(ids)} x {hidden} columns, a feature for each of {_IDS}"
        raise CheckpointError(raw.where, rule, fc_columns, _CHOOSE)
    return _read_ids(raw, ids, num_layers, ids_name)


def _stated(
    raw: JsonObject,
    layers: tuple[int, ...],
    num_layers: int,
    hidden_size: int,
    fc_columns: int | None,
    written: tuple[int, ...] | None,
) -> CapturedLayers:
    if not _are_increasing(layers) or layers[-1] >= num_layers:
        rule = f"rise, and are layers of the target, 0..{num_layers - 1}"
        raise CheckpointError("draft.captured_layers", rule, list(layers), "name each layer once, in order")
    if fc_columns is not None and fc_columns != len(layers) * hidden_size:
        rule = f"as many layers as fc.weight joins, {fc_columns // hidden_size}"
        raise CheckpointError("draft.captured_layers", rule, list(layers), f"correct it; {raw.where} names {written}")
    names = "nothing" if written is None else list(written)
    return CapturedLayers(layers, (), f"draft.captured_layers {list(layers)} stands over {_IDS} {names}")


def _read_ids(
    raw: JsonObject, ids: tuple[int, ...], num_layers: int, ids_name: Literal["outputs", "inputs"]
) -> CapturedLayers:
    """Ids are clear where they are the default of one convention; else the layout's own convention goes first."""
    as_named = {"outputs": shifted_layers(ids, 0, num_layers), "inputs": shifted_layers(ids, -1, num_layers)}
    other: Literal["outputs", "inputs"] = "inputs" if ids_name == "outputs" else "outputs"
    default = default_layers(num_layers)
    for name in (ids_name, other):
        layers = as_named[name]
        if layers is not None and layers == default:
            return CapturedLayers(layers, (), f"{_IDS} {list(ids)} names {name}: outputs of {list(layers)}")
    own, readings = as_named[ids_name], tuple(filter(None, (as_named[ids_name], as_named[other])))
    if own is None:
        limit = f"below {num_layers}" if ids_name == "outputs" else f"1 to {num_layers}, as they name inputs"
        raise raw.error(_IDS, f"increasing ids of the target's layers, {limit}", list(ids))
    note = f"{_IDS} {list(ids)} names {ids_name} in this layout: outputs of {list(own)}"
    return CapturedLayers(own, readings if len(readings) > 1 else (), note)


def written_ids(raw: JsonObject) -> tuple[int, ...] | None:
    """Return the ids that ``config.json`` names, whatever they mean; None where there are none.

    Raises: CheckpointError for two lists that differ, and for switches of another network.
    """
    inner = raw.get("eagle_config")
    if inner is not None and not isinstance(inner, dict):
        raise raw.error("eagle_config", "an object", inner)
    settings = JsonObject(raw.where, inner or {})
    for key, value in settings.values.items():
        if key == _IDS or value is None or (key in _SWITCHES and _SWITCHES[key] in (None, value)):
            continue
        wanted = f"one of {_IDS}, {', '.join(_SWITCHES)}" if key not in _SWITCHES else f"{_SWITCHES[key]}".lower()
        rule = f"eagle_config.{key} is {wanted}"
        raise CheckpointError(
            raw.where, rule, str(value).lower(), "use a head in the layout of the reference implementation"
        )
    found = [owner.integers(_IDS) for owner in (settings, raw) if owner.get(_IDS) is not None]
    if len(set(found)) > 1:
        got = " and ".join(str(list(ids)) for ids in found)
        raise CheckpointError(raw.where, f"{_IDS} is written once", got, "remove the wrong one")
    return found[0] if found else None


def shifted_layers(layers: tuple[int, ...], by: int, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers so many further on; None where a target of ``num_layers`` has not all of them."""
    moved = tuple(layer + by for layer in layers)
    return moved if moved[0] >= 0 and moved[-1] < num_layers else None


def _are_increasing(ids: tuple[int, ...]) -> bool:
    return bool(ids) and ids[0] >= 0 and all(left < right for left, right in itertools.pairwise(ids))

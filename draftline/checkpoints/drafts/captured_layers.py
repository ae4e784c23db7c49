"""Which layers of the target feed an EAGLE-3 head.

Ids in published configurations follow two conventions that differ by one, and a wrong guess costs acceptance in
silence: here an id names the layer whose *output* the head reads (SpecForge, ModelOpt); the list that the other
convention ("input of layer k") has by default is refused.
"""

from __future__ import annotations

import itertools

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.json_object import JsonObject
from draftline.errors import CheckpointError

_IDS = "eagle_aux_hidden_state_layer_ids"
_CHOOSE = "choose the head that was trained for this target"


def parse_captured_layers(raw: JsonObject, target: CheckpointConfig, fc_columns: int | None) -> tuple[int, ...]:
    """Return the 0-based layers whose outputs are concatenated for ``fc``, lowest first.

    ``fc_columns`` is the width of ``fc.weight``, None where the tensor is absent (an error that is found elsewhere).
    Without ids in ``config.json`` the layers are the reference's: outputs of 1, n // 2 - 1 and n - 4 of n layers.

    Raises:
        CheckpointError: ``fc`` is not as wide as the layers are, or ids are wrong, ambiguous or wanting.
    """
    num_layers, hidden = target.num_hidden_layers, target.hidden_size
    if fc_columns is not None and (fc_columns == 0 or fc_columns % hidden):
        rule = f"fc.weight has a multiple of the target's hidden_size ({hidden}) columns"
        raise CheckpointError(raw.where, rule, fc_columns, _CHOOSE)
    default = (1, num_layers // 2 - 1, num_layers - 4)
    ids = _written_ids(raw)
    if ids is None:
        num_features = len(default) if fc_columns is None else fc_columns // hidden
        if num_features != len(default) or not _are_increasing(default):
            rule = f"config.json names the target's layers in {_IDS}"
            got = f"no such key, {num_features} features and a target of {num_layers} layers"
            raise CheckpointError(raw.where, rule, got, "write the 0-based layers whose outputs the head reads")
        return default
    if not _are_increasing(ids) or ids[-1] >= num_layers:
        raise raw.error(_IDS, f"increasing ids of the target's layers, below {num_layers}", list(ids))
    other = tuple(layer + 1 for layer in default)
    if ids == other and _are_increasing(default):
        rule = "a list of layers whose outputs, not inputs, the head reads"
        raise raw.error(_IDS, rule, list(ids), f"write {list(default)} if the ids mean inputs")
    if fc_columns is not None and fc_columns != len(ids) * hidden:
        rule = f"fc.weight has {len(ids)} x {hidden} columns, a feature for each of {_IDS}"
        raise CheckpointError(raw.where, rule, fc_columns, _CHOOSE)
    return ids


def _written_ids(raw: JsonObject) -> tuple[int, ...] | None:
    inner = raw.get("eagle_config")
    if inner is not None and not isinstance(inner, dict):
        raise raw.error("eagle_config", "an object", inner)
    settings = JsonObject(raw.where, inner or {})
    unknown = sorted(set(settings.values) - {_IDS, "use_aux_hidden_state"})
    if unknown or not settings.flag("use_aux_hidden_state", True):
        got = ", ".join(unknown) or "use_aux_hidden_state false"
        rule = f"eagle_config holds {_IDS} and use_aux_hidden_state true"
        raise CheckpointError(raw.where, rule, got, "use a head in the layout of the reference implementation")
    found = [owner.integers(_IDS) for owner in (settings, raw) if owner.get(_IDS) is not None]
    if len(set(found)) > 1:
        got = " and ".join(str(list(ids)) for ids in found)
        raise CheckpointError(raw.where, f"{_IDS} is written once", got, "remove the wrong one")
    return found[0] if found else None


def _are_increasing(ids: tuple[int, ...]) -> bool:
    return bool(ids) and all(left < right for left, right in itertools.pairwise(ids))

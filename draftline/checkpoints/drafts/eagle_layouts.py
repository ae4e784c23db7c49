"""The import matrix of EAGLE heads: which layouts there are, and how the contents of a checkpoint tell them apart.

Source: the loaders and exporters of the projects named below, as of August 2026. Nothing is guessed from names of
folders or files; the vendors' names stand in this module alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftline.checkpoints.draft_config import HeadMethod
from draftline.checkpoints.json_object import JsonObject
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError


@dataclass(frozen=True)
class EagleLayout:
    """One row. ``first_layer`` and ``later_layer`` are the prefixes of the layers' tensors.

    ``ids_name``: whether ids of captured layers mean the layer whose output, or whose input, the head reads.
    ``norm_output_feeds``: what ``norm_output`` says: that the normed output is fed to the next depth (EAGLE-3.1), or
    only that ``norm`` stands before ``lm_head``, as it always does. ``fc``: how that layer is named. ``bias_key``: of
    EAGLE-1, which tells whether it has a bias, and what that is if absent. ``is_nested``: whether the layers stand in
    ``transformer_layer_config``.
    """

    name: str
    method: HeadMethod
    first_layer: str = "layers.0"
    later_layer: str = "layers.{layer}"
    later_input_norm: str = "input_layernorm"
    ids_name: Literal["outputs", "inputs"] = "outputs"
    norm_output_feeds: bool = True
    fc: str = "fc"
    bias_key: tuple[str, bool] = ("bias", True)
    is_nested: bool = False


EAGLE1 = EagleLayout("EAGLE-1/2", "eagle1")
REFERENCE = EagleLayout("EAGLE-3 of the reference and of SpecForge", "eagle3", "midlayer", norm_output_feeds=False)
MEGATRON = EagleLayout(
    "EAGLE-3 of ModelOpt, from Megatron", "eagle3", "midlayer.0", "midlayer.{layer}", later_input_norm="hidden_norm"
)
MODELOPT = EagleLayout("EAGLE-3 of ModelOpt", "eagle3")
SPECULATORS = EagleLayout("EAGLE-3 of speculators", "eagle3", ids_name="inputs", is_nested=True)
SPECULATORS1 = EagleLayout(
    "EAGLE-1 of speculators",
    "eagle1",
    "transformer",
    fc="fusion_fc",
    bias_key=("fusion_bias", False),
    is_nested=True,
)
EAGLE_LAYOUTS = (EAGLE1, REFERENCE, MEGATRON, MODELOPT, SPECULATORS, SPECULATORS1)
_BY_MODEL_TYPE = {"eagle3": SPECULATORS, "eagle": SPECULATORS1}  # speculators_model_type

# What EAGLE-3 heads have and EAGLE-1 heads have not; each alone tells, so that one that is missing is missed by name.
_EAGLE3_TENSORS = ("layers.0.hidden_norm.weight", "norm.weight", "d2t", "t2d")
_EAGLE3_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")

# Drafts of other kinds: what one is, the names of its tensors (None = any), the key that tells it, what to do.
_NO_SUPPORT = "choose a head of another kind"
_OTHER_DRAFTS: tuple[tuple[str, str | None, str | None, str], ...] = (
    (
        "Medusa heads",
        r"(medusa_heads?\.)?\d+\.(medusa_layers\.)?\d+\.linear\.weight",
        None,
        "set draft.method to medusa",
    ),
    ("a whole model", r"model\.layers\.0\..*", None, "set draft.method to draft_model"),
    ("an MTP head", r"mtp(_layers)?\..*", None, _NO_SUPPORT),
    ("a head with latent attention", r".*\.kv_a_proj_with_mqa\.weight", None, _NO_SUPPORT),
    ("a head with parallel drafts", r"parallel_draft_heads\..*", None, _NO_SUPPORT),
    ("a P-EAGLE head", r"mask_hidden", "mask_token_id", _NO_SUPPORT),
    ("a DSpark head", None, "markov_rank", _NO_SUPPORT),
    ("a Domino head", None, "gru_hidden_dim", _NO_SUPPORT),
    ("a DFlash head", None, "dflash_config", _NO_SUPPORT),
)


def recognise_layout(raw: JsonObject, tensors: Mapping[str, SourceTensor], where: Path) -> EagleLayout:
    """Return the layout of an EAGLE head by its ``config.json`` and the names of its tensors.

    Raises: CheckpointError for a draft of another kind, which it names.
    """
    rule = "the folder holds an EAGLE head"
    for kind, pattern, key, cure in _OTHER_DRAFTS:
        name = next((name for name in tensors if pattern and re.fullmatch(pattern, name)), None)
        if name or (key and raw.get(key) is not None):
            raise CheckpointError(where, rule, f"{kind}: {name or key}", cure)
    model_type = raw.get("speculators_model_type")
    if model_type is not None:
        if model_type not in _BY_MODEL_TYPE:
            raise raw.error("speculators_model_type", '"eagle3" or "eagle"', model_type, _NO_SUPPORT)
        return _BY_MODEL_TYPE[model_type]
    if any(name.startswith("midlayer.0.") for name in tensors):
        return MEGATRON
    if any(name.startswith("midlayer.") for name in tensors):
        return REFERENCE
    if not any(name.startswith("layers.0.") for name in tensors):
        got = ", ".join(list(tensors)[:3]) or "no tensors"
        raise CheckpointError(where, rule, got, "give the folder of an EAGLE head")
    is_eagle3 = any(name in tensors for name in _EAGLE3_TENSORS) or any(
        raw.get(key) is not None for key in _EAGLE3_KEYS
    )
    return MODELOPT if is_eagle3 else EAGLE1

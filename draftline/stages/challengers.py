"""What a head may have been trained with, against what its checkpoint says: the mistakes that published heads have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.captured_layers import default_layers, shifted_layers
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.trtllm import WEIGHTS_FILE

COMMON_BASES = (10000.0, 500000.0, 1000000.0)  # the reference's, which configurations deny; those of Llama 3 and Qwen


@dataclass(frozen=True)
class Challenger:
    """A reading of a head, by the words to write. ``has_ids``: its ``d2t`` holds the target's ids, not offsets;
    ``is_default``: it has the layers of the reference."""

    name: str
    head: HeadConfig
    has_ids: bool = False
    is_default: bool = False

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def cure(self) -> str:
        if self.has_ids:
            return "store d2t[draft id] - draft id"
        if self.kind == "layers":
            return f"set draft.captured_layers to {list(self.head.captured_layers)}"
        return f"write {self.name} into its config.json"

    def stands_beside(self, head: HeadConfig) -> bool:
        """Whether it differs from ``head`` in one thing."""
        is_same = self.head.captured_layers == head.captured_layers
        return not is_same if self.kind == "layers" else is_same


def with_layers(head: HeadConfig, layers: tuple[int, ...]) -> HeadConfig:
    return replace(head, captured_layers=layers)


def challengers(readings: Sequence[HeadConfig], folder: Path, target: CheckpointConfig) -> list[Challenger]:
    """Return the challengers of each of the ``readings`` of a head, which is converted in ``folder``."""
    if readings[0].method == "medusa":
        return []
    found = [*_of_layers(readings, target)]
    for head in readings:
        found += _of_bases(head, target)
        if _may_hold_ids(head, folder):
            found.append(Challenger("d2t of target ids", head, has_ids=True))
    return found


def _of_layers(readings: Sequence[HeadConfig], target: CheckpointConfig) -> Iterator[Challenger]:
    """Neighbours, as the two conventions of ids differ by one, and the reference's; open ones are not challenged."""
    head, num_layers = readings[0], target.num_hidden_layers
    known = [reading.captured_layers for reading in readings]
    if not head.captured_layers:
        return
    for layers in (
        default_layers(num_layers),
        *(shifted_layers(head.captured_layers, by, num_layers) for by in (1, -1)),
    ):
        if layers is not None and layers not in known and len(layers) == len(head.captured_layers):
            known.append(layers)
            is_default = layers == default_layers(num_layers)
            yield Challenger(f"layers {list(layers)}", with_layers(head, layers), is_default=is_default)


def _of_bases(head: HeadConfig, target: CheckpointConfig) -> Iterator[Challenger]:
    tried = [(head.rotary_base, head.rotary_scaling)]
    for base, scaling in ((target.rotary_base, target.rotary_scaling), *((base, None) for base in COMMON_BASES)):
        if (base, scaling) not in tried:
            tried.append((base, scaling))
            scaled = "" if scaling is None else f" with rope_scaling {scaling}"
            yield Challenger(f"rope_theta {base:g}{scaled}", replace(head, rotary_base=base, rotary_scaling=scaling))


def _may_hold_ids(head: HeadConfig, folder: Path) -> bool:
    """Whether offsets rise as ids do, from 0 on: those of a vocabulary with runs of neighbours do not."""
    path = folder / WEIGHTS_FILE
    place = tensor_locations(path).get("d2t")
    if place is None:
        return False
    offsets = map_tensor(path, place)
    return bool((np.diff(offsets, prepend=-1) > 0).all() and offsets[-1] < head.vocab_size)

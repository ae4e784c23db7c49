"""Which rank does what."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mapping:
    """``pp_size`` stages of consecutive layers, each on ``tp_size`` ranks that divide its matrices.

    Source: TensorRT-LLM's ``Mapping``: rank = stage * tp_size + place in the stage; where the layers do not divide by
    the stages, the first stages have one layer more.
    """

    tp_size: int = 1
    pp_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def layers(self, num_layers: int) -> list[range]:
        """Return the layers of each stage.

        >>> Mapping(pp_size=3).layers(8)
        [range(0, 3), range(3, 6), range(6, 8)]
        """
        whole, longer = divmod(num_layers, self.pp_size)
        starts = [stage * whole + min(stage, longer) for stage in range(self.pp_size + 1)]
        return [range(*pair) for pair in itertools.pairwise(starts)]

    def rank(self, stage: int, place: int) -> int:
        return stage * self.tp_size + place

    def values(self) -> dict[str, int]:
        """Return the object ``mapping`` of ``config.json``."""
        return {"world_size": self.world_size, "tp_size": self.tp_size, "pp_size": self.pp_size}


def weights_file(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.safetensors"

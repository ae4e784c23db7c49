"""What a head must know of its target: sizes alone, so that targets which no reader here knows have heads too."""

from __future__ import annotations

from typing import Protocol


class TargetSizes(Protocol):
    """Every ``CheckpointConfig`` has these."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

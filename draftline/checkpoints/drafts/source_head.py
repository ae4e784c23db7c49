"""What every reader of a head hands to the converter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.names import TargetTensor
from draftline.checkpoints.source_tensor import SourceTensor


@dataclass(frozen=True)
class SourceHead:
    """A head to convert: its ``tensors`` are known to be those that ``wanted`` asks for, of the right shapes.

    ``vocabulary_offsets``: ``d2t [draft_vocab_size] int64``, None where the head has the target's vocabulary.
    """

    config: HeadConfig
    wanted: list[TargetTensor]
    tensors: Mapping[str, SourceTensor]
    vocabulary_offsets: NDArray[np.int64] | None = None

"""A drafter on ONNX Runtime, beside the target session whose features it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.engine_config import EngineConfig
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.protocol import DraftBatch, DraftResult


class OnnxRuntimeDraftSession:
    """Implements ``DraftSession``."""

    def __init__(self, directory: Path, config: EngineConfig, index: int, target_session: OnnxRuntimeSession) -> None:
        raise NotImplementedError

    def forward(self, batch: DraftBatch) -> DraftResult:
        raise NotImplementedError

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

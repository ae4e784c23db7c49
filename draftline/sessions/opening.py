"""Open the session that an engine directory was built for."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import ArtifactError
from draftline.sessions.engine_config import EngineConfig
from draftline.sessions.protocol import Session


def open_session(directory: Path, config: EngineConfig) -> Session:
    """Load the engine in ``directory``; the vendor's package is imported here and nowhere else.

    Raises: ArtifactError for an unknown backend or a damaged engine, MissingPackageError without the vendor's package.
    """
    if config.backend == "onnxruntime":
        from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

        return OnnxRuntimeSession(directory, config)
    raise ArtifactError(
        f"{directory / 'config.json'}: backend", "must be onnxruntime", config.backend, "build the engine again"
    )

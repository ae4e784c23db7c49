"""Open the sessions that an engine directory was built for."""

from __future__ import annotations

from pathlib import Path

from draftline.config.rules import GPU_BACKENDS
from draftline.errors import ArtifactError
from draftline.sessions.engine_config import METHODS_WITH_SESSIONS, EngineConfig
from draftline.sessions.protocol import DraftSession, Session

_SAME_BACKEND = "drafters read the features of a session of their backend"


def open_session(directory: Path, config: EngineConfig) -> Session:
    """Load the engine in ``directory``; the vendor's package is imported here and nowhere else.

    Raises: ArtifactError for an unknown backend, a damaged engine or one that needs a GPU where there is none,
    MissingPackageError without the vendor's package, DraftlineError where a GPU's memory does not hold it.
    """
    if config.backend == "onnxruntime":
        from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

        return OnnxRuntimeSession(directory, config)
    if config.backend in GPU_BACKENDS:
        from draftline.sessions.tensorrt.session import TensorRtSession

        return TensorRtSession(directory, config)
    where = f"{directory / 'config.json'}: backend"
    known = ", ".join(("onnxruntime", *GPU_BACKENDS))
    raise ArtifactError(where, f"is one of {known}", config.backend, "build the engine again")


def check_openable(directory: Path, config: EngineConfig) -> None:
    """Refuse, before anything is loaded, an engine that this machine cannot run. Raises: as ``open_session``."""
    if config.backend in GPU_BACKENDS:
        from draftline.sessions.tensorrt.device_engine import check_openable

        check_openable(directory, config)


def open_draft_sessions(
    directory: Path, config: EngineConfig, target_session: Session
) -> tuple[DraftSession | None, ...]:
    """Load the drafters of the engine in ``directory`` beside its target session, in the order of ``config.drafts``.

    None stands for a drafter without a graph of its own: n-gram lookup, and Medusa, whose heads are in the target's.

    Raises: ArtifactError for a damaged engine, MissingPackageError without the vendor's package.
    """
    if not any(draft.method in METHODS_WITH_SESSIONS for draft in config.drafts):
        return (None,) * len(config.drafts)
    if config.backend in GPU_BACKENDS:
        from draftline.sessions.tensorrt.draft_session import TensorRtDraftSession
        from draftline.sessions.tensorrt.session import TensorRtSession

        assert isinstance(target_session, TensorRtSession), _SAME_BACKEND
        return tuple(
            TensorRtDraftSession(index, target_session) if draft.method in METHODS_WITH_SESSIONS else None
            for index, draft in enumerate(config.drafts)
        )
    from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
    from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

    assert isinstance(target_session, OnnxRuntimeSession), _SAME_BACKEND
    return tuple(
        OnnxRuntimeDraftSession(directory, config, index, target_session)
        if draft.method in METHODS_WITH_SESSIONS
        else None
        for index, draft in enumerate(config.drafts)
    )

"""Open the sessions that an engine directory was built for."""

from __future__ import annotations

from pathlib import Path

from draftline.errors import ArtifactError
from draftline.sessions.engine_config import METHODS_WITH_SESSIONS, EngineConfig
from draftline.sessions.protocol import DraftSession, Session


def open_session(directory: Path, config: EngineConfig) -> Session:
    """Load the engine in ``directory``; the vendor's package is imported here and nowhere else.

    Raises: ArtifactError for an unknown backend or a damaged engine, MissingPackageError without the vendor's package.
    """
    if config.backend == "onnxruntime":
        from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

        return OnnxRuntimeSession(directory, config)
    where = f"{directory / 'config.json'}: backend"
    if config.tensorrt is not None:
        cure = "serve an engine of onnxruntime, from `draftline run FILE engine.backend=onnxruntime`"
        raise ArtifactError(where, "this version serves engines of onnxruntime", config.backend, cure)
    raise ArtifactError(where, "must be onnxruntime", config.backend, "build the engine again")


def open_draft_sessions(
    directory: Path, config: EngineConfig, target_session: Session
) -> tuple[DraftSession | None, ...]:
    """Load the drafters of the engine in ``directory`` beside its target session, in the order of ``config.drafts``.

    None stands for a drafter without a graph of its own: n-gram lookup, and Medusa, whose heads are in the target's.

    Raises: ArtifactError for a damaged engine, MissingPackageError without the vendor's package.
    """
    if not any(draft.method in METHODS_WITH_SESSIONS for draft in config.drafts):
        return (None,) * len(config.drafts)
    from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
    from draftline.sessions.onnxruntime_session import OnnxRuntimeSession

    assert isinstance(target_session, OnnxRuntimeSession), "drafters read the features of a session of their backend"
    return tuple(
        OnnxRuntimeDraftSession(directory, config, index, target_session)
        if draft.method in METHODS_WITH_SESSIONS
        else None
        for index, draft in enumerate(config.drafts)
    )

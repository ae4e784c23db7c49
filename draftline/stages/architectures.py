"""What the checkpoints of a pipeline are, before anything is done with them."""

from __future__ import annotations

from pathlib import Path

from draftline.config import Pipeline


def check_architectures(pipeline: Pipeline, root: Path) -> None:
    """Check the target and the draft models, where they lie in folders already; ``root``: the pipeline file's folder.

    TensorRT-LLM's route ``llmapi`` reads models that are none of ours.

    Raises: CheckpointError for an architecture that the graphs do not compute.
    """
    from draftline.checkpoints.json_object import load_json
    from draftline.checkpoints.refused_architectures import check_architecture

    if pipeline.engine.route == "llmapi":
        return
    models = [draft.checkpoint for draft in pipeline.draft if draft.method == "draft_model"]
    for reference in (pipeline.target.checkpoint, *models):
        config = root / (reference or "") / "config.json"
        if config.is_file():
            check_architecture(load_json(config))

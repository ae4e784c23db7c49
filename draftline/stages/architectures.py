"""What the checkpoints of a pipeline are, before anything is done with them."""

from __future__ import annotations

from pathlib import Path

from draftline.config import Pipeline


def check_architectures(pipeline: Pipeline, root: Path) -> None:
    """Check the target and the draft models, where they lie in folders already; ``root``: the pipeline file's folder.

    TensorRT-LLM's route ``llmapi`` reads models that are none of ours.

    Raises: CheckpointError for a network that the graphs do not compute, and a quantisation that is not read.
    """
    from draftline.checkpoints.json_object import load_json

    if pipeline.engine.route == "llmapi":
        return
    models = [draft.checkpoint for draft in pipeline.draft if draft.method == "draft_model"]
    for reference in (pipeline.target.checkpoint, *models):
        folder = root / (reference or "")
        if (folder / "config.json").is_file():
            # Those need numpy, which a command without a folder to look at does not import.
            from draftline.checkpoints.huggingface_config import parse_huggingface_config
            from draftline.checkpoints.quantized.recognition import recognise_layout
            from draftline.checkpoints.quantized.stated import find_quantization

            config = load_json(folder / "config.json")
            if (stated := find_quantization(folder, config)) is not None:
                recognise_layout(stated)
            parse_huggingface_config(config, None, pipeline.target.dtype)

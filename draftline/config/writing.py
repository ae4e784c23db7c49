"""A pipeline as the text of a pipeline file."""

from __future__ import annotations

import yaml

from draftline.config.schema import Pipeline


def pipeline_text(pipeline: Pipeline) -> str:
    """Return a pipeline file that loads as ``pipeline``, with every default written out."""
    values = pipeline.model_dump(exclude_none=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)

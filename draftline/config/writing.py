"""A pipeline as the text of a pipeline file."""

from __future__ import annotations

import yaml

from draftline.config.schema import Pipeline


def pipeline_text(pipeline: Pipeline) -> str:
    """Return a pipeline file that loads as ``pipeline``, with every default written out."""
    values = pipeline.model_dump(exclude_none=True)
    drafts = values.pop("draft")
    ordered = {name: values[name] for name in ("name", "target")}
    if drafts:
        ordered["draft"] = list(drafts) if len(drafts) > 1 else drafts[0]
    return yaml.dump(ordered | values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes tuples, which are a tree's paths, on few lines."""


_Dumper.add_representer(
    tuple, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)

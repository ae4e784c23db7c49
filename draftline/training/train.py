"""``draftline train``: the target answers prompts, a head learns from the answers, the draft lands in its folder.

Every step is done again only where what it follows from changed, and goes on where it was killed. Several processes of
a launcher share the training alone; the steps before it, one process does first.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import draftline
from draftline.checkpoints.disk_space import check_free_space
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Pipeline, Train
from draftline.config.writing import pipeline_text
from draftline.errors import TrainingError
from draftline.manifest import (
    PIPELINE,
    FileHasher,
    Manifest,
    find_damage,
    load_manifest,
    lock_directory,
    record_outputs,
    write_manifest,
)
from draftline.stages.progress import Progress
from draftline.stages.runner import run_pipeline
from draftline.training.answers import answer_prompts, describe_answers
from draftline.training.checkpoint import STATE_FILE, Position, load_state
from draftline.training.description import DESCRIPTION_FILE, Description, check_same, load_description
from draftline.training.examples import Examples, hash_examples, open_examples, read_index
from draftline.training.export import export_draft, finish_head
from draftline.training.heads import DraftHead
from draftline.training.making import make_head
from draftline.training.measuring import check_held_out_packages, measure_draft
from draftline.training.processes import Processes, is_main_process, num_launched_processes
from draftline.training.prompts import load_prompts
from draftline.training.provenance import describe_provenance
from draftline.training.report import LOG_FILE, load_log, write_plots, write_table
from draftline.training.steps import (
    STEPS,
    Folders,
    check_draft_folder,
    check_packages,
    check_step,
    check_train_block,
    check_trainable,
    default_captured_layers,
    find_difference,
    find_folders,
    target_alone,
    training_inputs,
)
from draftline.training.trainer import Trainer

STATE_NUMBERS = 6  # of each weight: itself and the optimiser's two, in the old state and the new one


@dataclass(frozen=True)
class TrainReport:
    """``draft``: the folder of the trained draft. ``course`` and ``acceptance``: tables of the training, and of what
    the target accepts. None where the steps asked for end before."""

    draft: Path | None = None
    course: str | None = None
    acceptance: str | None = None


def train_draft(
    pipeline: Pipeline,
    output: Path,
    *,
    root: Path,
    until: str | None = None,
    progress: Progress | None = None,
    argv: Sequence[str] | None = None,
) -> TrainReport:
    """Train the draft of a pipeline's block ``train``, up to and including the step ``until`` (None = all).

    ``output`` is the build directory, ``root`` the folder that relative checkpoints start from, the pipeline file's.

    Raises: PipelineError without the block, MissingPackageError, CheckpointError where the draft's folder holds
    something else or the disk is full, ArtifactError where the data are another target's or tokenizer's, damaged, or
    in use, TrainingError where training diverges.
    """
    settings, num_steps = check_train_block(pipeline), check_step(until)
    check_packages()
    if num_steps == len(STEPS):
        check_held_out_packages()
    folders = find_folders(settings, output, root)
    check_draft_folder(folders.draft)
    run = _Run(
        pipeline, settings, folders, root, progress or Progress(quiet=True), ["draftline", *(argv or sys.argv)[1:]]
    )
    if not is_main_process():
        return run.take_steps(num_steps)
    with lock_directory(folders.train):
        return run.take_steps(num_steps)


@dataclass(frozen=True)
class _Run:
    pipeline: Pipeline
    settings: Train
    folders: Folders
    root: Path
    progress: Progress
    argv: list[str]

    def take_steps(self, num_steps: int) -> TrainReport:
        self._convert()
        if num_steps == 1:
            return TrainReport()
        description = self._describe()
        self._answer(description)
        if num_steps == 2:
            return TrainReport()
        data_sha256 = hash_examples(self.folders.data, self.settings.answer_tokens)
        inputs = training_inputs(self.settings, description.target_sha256, data_sha256)
        state = load_state(self.folders.train)
        is_trained = state is not None and state.made_from == inputs and state.position.is_finished
        if is_trained and (num_steps == 3 or self._is_exported(inputs)):
            self._say("train: current")
        else:
            self._train(inputs, is_exported=num_steps > 3)
        if not is_main_process():
            return TrainReport()
        course = write_table(self.folders.train)
        if num_steps == 3:
            return TrainReport(None, course)
        return TrainReport(self.folders.draft, course, self._measure() if num_steps > 4 else None)

    def _measure(self) -> str:
        folders = self.folders
        return measure_draft(
            self.pipeline, self.settings, folders.draft, folders.acceptance, self.progress, self.argv, self.root
        )

    def _say(self, line: str) -> None:
        if is_main_process():
            self.progress.say(line)

    def _convert(self) -> None:
        alone, build = target_alone(self.pipeline), self.folders.target_build
        several = num_launched_processes() > 1
        progress = Progress(quiet=True) if several else self.progress
        reports = run_pipeline(alone, build, root=self.root, until="convert", dry_run=several, progress=progress)
        if several and reports[0].reason is not None:
            self._refuse_several("convert", reports[0].reason)

    def _refuse_several(self, step: str, reason: str) -> None:
        rule, cure = "one process takes the steps before training", f"run it with --until {step} without the launcher"
        raise TrainingError(f"draftline train: {step}", rule, f"{num_launched_processes()} processes, {reason}", cure)

    def _describe(self) -> Description:
        settings, target = self.settings, self.folders.target
        config = load_checkpoint_config(target)
        check_trainable(config)
        return describe_answers(
            target,
            captured_layers=default_captured_layers(config),
            weights_dtype=self.pipeline.engine.weights_dtype,
            prompts=settings.prompts,
            temperature=settings.temperature,
            max_tokens=settings.max_answer_tokens,
            seed=settings.seed,
        )

    def _answer(self, description: Description) -> None:
        """Let the target answer until there are enough answers."""
        folder, wanted = self.folders.data, self.settings.answer_tokens
        there = 0
        if (folder / DESCRIPTION_FILE).exists():
            check_same(folder, load_description(folder), description)
            there = sum(entry.num_answer_tokens for entry in read_index(folder)[0])
        if there >= wanted:
            self._say(f"answers: current, {there} tokens")
            return
        if num_launched_processes() > 1:
            self._refuse_several("answers", f"{there} of {wanted} tokens of answers")
        self._say(f"answers: {there} of {wanted} tokens are there")
        prompts = load_prompts(self.settings.prompts, self.settings.seed)
        summary = answer_prompts(
            prompts,
            self.folders.target,
            folder,
            description,
            num_answer_tokens=wanted,
            num_threads=self.pipeline.engine.num_threads,
            quiet=self.progress.is_quiet,
        )
        skipped = "".join(f"; {number} prompts skipped: {rule}" for rule, number in summary.num_skipped.items())
        speed = summary.num_new_tokens / max(summary.seconds, 1e-9)
        self._say(f"answers: {summary.num_answer_tokens} tokens, {speed:.0f} new ones a second{skipped}")

    def _train(self, inputs: Mapping[str, str], *, is_exported: bool) -> None:
        examples = open_examples(self.folders.data, self.settings.answer_tokens)
        head, notes = make_head(self.settings, self.folders.target, self.pipeline.target.checkpoint, examples)
        num_bytes = 4 * STATE_NUMBERS * sum(parameter.numel() for parameter in head.parameters())
        check_free_space(self.folders.train / STATE_FILE, num_bytes)
        self._say_what_happens(inputs)
        processes = Processes()
        trainer = Trainer(head, examples, self.settings, self.folders.train, inputs, processes)
        self._say(f"train: {trainer.describe()}" + "".join(f", {name} {value}" for name, value in notes.items()))
        with self.progress.follow("train") as advance:
            position = trainer.run(advance, lambda line: self._say(f"train: {line}"))
        processes.leave()
        if not is_main_process():
            return
        for path in write_plots(self.folders.train):
            self._say(f"train: {path}")
        if is_exported:
            self._export(head, examples, inputs, position, notes)

    def _say_what_happens(self, inputs: Mapping[str, str]) -> None:
        state = load_state(self.folders.train)
        if state is None:
            self._say("train: it never ran")
        elif difference := find_difference(state.made_from, inputs):
            self._say(f"train: {difference}; it starts anew")
        elif not state.position.is_finished:
            self._say(f"train: goes on from step {state.position.step}")

    def _export(
        self,
        head: DraftHead,
        examples: Examples,
        inputs: Mapping[str, str],
        position: Position,
        notes: Mapping[str, float],
    ) -> None:
        provenance = describe_provenance(self.pipeline, self.settings, examples, inputs, position, self.argv)
        provenance["training"] |= {
            **notes,
            **finish_head(head, examples),
            "held_back": load_log(self.folders.train / LOG_FILE)[1][-1],
        }
        self.folders.draft.parent.mkdir(parents=True, exist_ok=True)
        export_draft(head, self.folders.draft, provenance)
        outputs = record_outputs(self.folders.draft, FileHasher())
        folder = self.folders.export
        folder.mkdir(exist_ok=True)
        (folder / PIPELINE).write_text(pipeline_text(self.pipeline), encoding="utf-8")
        seconds = round(position.seconds, 3)
        manifest = Manifest(
            "train", draftline.__version__, dict(inputs), {}, outputs, self.argv, seconds, provenance["created"]
        )
        write_manifest(folder, manifest)
        self._say(f"export: {self.folders.draft}")

    def _is_exported(self, inputs: Mapping[str, str]) -> bool:
        manifest = load_manifest(self.folders.export)
        if manifest is None or manifest.inputs != inputs or not self.folders.draft.is_dir():
            return False
        return find_damage(self.folders.draft, manifest, FileHasher()) is None

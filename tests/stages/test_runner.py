"""The runner, driven with small stages."""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from draftline.config import Pipeline
from draftline.errors import ArtifactError, DraftlineError, MissingPackageError
from draftline.manifest import FileHasher, find_damage, load_manifest, lock_directory
from draftline.stages.progress import Progress
from draftline.stages.runner import StageReport, run_pipeline
from draftline.stages.stage import Stage, StageCall

NUM_STEPS = 5


@dataclass(frozen=True)
class Counted:
    num_bytes: int


def copy(call: StageCall) -> Counted:
    content = (call.source / "weights").read_bytes()
    for step in range(NUM_STEPS):
        with (call.destination / "copy").open("ab") as file:
            file.write(content[step::NUM_STEPS])
        call.advance(step + 1, NUM_STEPS)
    return Counted(len(content))


def reverse(call: StageCall) -> Counted:
    content = (call.build_directory / "checkpoint" / "copy").read_bytes()
    (call.destination / "engine").write_bytes(content[::-1] + call.pipeline.engine.weights_dtype.encode())
    os.link(call.build_directory / "checkpoint" / "copy", call.destination / "copy")
    return Counted(len(content))


def measure(call: StageCall) -> Counted:
    size = (call.build_directory / "engine" / "engine").stat().st_size
    (call.destination / "size").write_text(str(size // 10))
    return Counted(size)


STAGES = (
    Stage("convert", "checkpoint", copy, settings=("target.dtype",), packages=("numpy",), reads_source=True),
    Stage("build", "engine", reverse, settings=("engine.weights_dtype",), needs=("convert",)),
    Stage("smoke", "smoke", measure, needs=("build",)),
)


def pipeline(**engine: object) -> Pipeline:
    return Pipeline.model_validate({"name": "tiny", "target": {"checkpoint": "model"}, "engine": engine})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(range(256)) * 40)
    return tmp_path


def run(root: Path, *, stages: tuple[Stage, ...] = STAGES, until: str | None = None, **engine: object) -> list[str]:
    """Return the reasons of the stages that ran, as ``stage: reason``."""
    return told(run_pipeline(pipeline(**engine), root / "build", root=root, stages=stages, until=until))


def told(reports: list[StageReport]) -> list[str]:
    return [f"{report.stage}: {report.reason}" for report in reports if report.reason is not None]


def artifacts(build_directory: Path) -> dict[str, str]:
    hashes = {}
    for stage in STAGES:
        manifest = load_manifest(build_directory / stage.directory)
        assert manifest is not None
        hashes[stage.name] = manifest.outputs_sha256()
    return hashes


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_second_run_does_nothing(root: Path) -> None:
    assert run(root) == ["convert: it never ran", "build: it never ran", "smoke: it never ran"]
    before = {path: path.stat().st_mtime_ns for path in (root / "build").rglob("*") if path.name != ".lock"}
    assert run(root) == []
    assert before == {path: path.stat().st_mtime_ns for path in (root / "build").rglob("*") if path.name != ".lock"}
    assert names(root / "build") == {".lock", "checkpoint", "engine", "smoke"}
    assert names(root / "build" / "engine") == {"copy", "engine", "manifest.json", "pipeline.yaml", "reproduce.sh"}


def test_only_what_depends_on_a_change_runs(root: Path) -> None:
    run(root)
    assert run(root, weights_dtype="int8") == [
        'build: setting engine.weights_dtype changed from "float32" to "int8"',
        "smoke: output of build changed",
    ]
    assert run(root, weights_dtype="int4") == [  # the size, smoke's input, differs; its output would not
        'build: setting engine.weights_dtype changed from "int8" to "int4"',
        "smoke: output of build changed",
    ]
    (root / "model" / "weights").write_bytes(b"x" * 100)
    assert run(root, weights_dtype="int4") == [
        "convert: file weights changed",
        "build: output of convert changed",
        "smoke: output of build changed",
    ]


def test_a_touched_input_is_current_and_a_damaged_output_is_made_again(root: Path) -> None:
    run(root)
    os.utime(root / "model" / "weights", ns=(5, 5))
    assert run(root) == []
    manifest = load_manifest(root / "build" / "checkpoint")
    assert manifest is not None
    assert manifest.input_files["weights"].mtime_ns == 5, "or it would be hashed in every run"
    (root / "build" / "engine" / "engine").write_bytes(b"damage")
    assert run(root) == ["build: output engine was changed"]


def test_new_code_and_other_packages_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root, until="convert")
    stages = (replace(STAGES[0], modules=("draftline.checkpoints.source",)),)
    assert run(root, stages=stages) == ["convert: code changed"]
    monkeypatch.setattr("draftline.stages.inputs.package_version", lambda name: "0.1")
    (reason,) = run(root, stages=stages)
    assert reason.startswith("convert: package numpy changed from ")


def test_until(root: Path) -> None:
    assert run(root, until="build") == ["convert: it never ran", "build: it never ran"]
    with pytest.raises(DraftlineError, match="--until: names a stage; got bild; the stages are convert, build, smoke"):
        run(root, until="bild")


def test_a_failing_stage_leaves_nothing_and_the_others_stay(root: Path) -> None:
    run(root)

    def fail(call: StageCall) -> Counted:
        (call.destination / "half").touch()
        raise OSError(28, "No space left on device", "half")

    stages = (STAGES[0], replace(STAGES[1], run=fail), STAGES[2])
    with pytest.raises(OSError, match="No space"):
        run(root, stages=stages, weights_dtype="int8")
    assert names(root / "build") == {".lock", "checkpoint", "engine", "smoke"}
    assert run(root) == []


def test_a_dry_run_writes_nothing_and_says_what_would_run(root: Path) -> None:
    def dry(**engine: object) -> list[str]:
        return told(run_pipeline(pipeline(**engine), root / "build", root=root, stages=STAGES, dry_run=True))

    assert dry() == ["convert: it never ran", "build: it never ran", "smoke: it never ran"]
    assert not (root / "build").exists()
    run(root)
    assert dry() == []
    assert dry(weights_dtype="int8")[1] == "smoke: build runs first; only if its output changes"


def test_refusals_come_before_any_work(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingPackageError, match=r"engine\.backend: tensorrt: needs the package tensorrt-cu13"):
        run(root, backend="tensorrt")
    assert not (root / "build").exists()
    (root / "build" / "engine").mkdir(parents=True)
    (root / "build" / "engine" / "mine").touch()
    with pytest.raises(ArtifactError, match="has a manifest"):
        run(root)
    with lock_directory(root / "build"), pytest.raises(ArtifactError, match="one run at a time"):
        run(root)


def test_what_a_stage_says_is_told_under_its_name(root: Path) -> None:
    def talk(call: StageCall) -> Counted:
        call.say("the copy is small")
        return copy(call)

    stream = io.StringIO()
    stages = (replace(STAGES[0], run=talk),)
    run_pipeline(pipeline(), root / "build", root=root, stages=stages, progress=Progress(stream))
    first, said, last = stream.getvalue().splitlines()
    assert first == "convert: it never ran"
    assert said == "convert: the copy is small"
    assert last.startswith("convert: done in ")


def test_the_manifest_says_how(root: Path) -> None:
    run_pipeline(pipeline(), root / "build", root=root, stages=STAGES, argv=["draftline", "run"])
    manifest = load_manifest(root / "build" / "checkpoint")
    assert manifest is not None
    assert manifest.argv == ["draftline", "run"]
    assert manifest.result == {"num_bytes": 256 * 40}
    assert {"draftline", "package numpy", "file weights", "setting target.dtype"} <= set(manifest.inputs)


def test_plain_progress(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_pipeline(pipeline(), root / "build", root=root, stages=STAGES[:1], progress=Progress(sys.stderr))
    run_pipeline(pipeline(), root / "build", root=root, stages=STAGES[:1], progress=Progress(sys.stderr))
    lines = capsys.readouterr().err.splitlines()
    assert [lines[0], lines[2]] == ["convert: it never ran", "convert: current"]
    assert lines[1].startswith("convert: done in ")


FILE_EVENTS = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.chmod"})


def crash(root: Path, countdown: int) -> bool:
    """Run in a child that is killed right before its ``countdown``-th file operation; return whether it was."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal countdown
        if event in FILE_EVENTS and str(root / "build") in str(arguments[0]):
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    run(root)
    os._exit(0)


def crash_everywhere(root: Path) -> None:
    """Kill a run at each of its file operations, over nothing and over an older build, and run it again each time."""
    os.fsync = lambda fd: None  # slow, and a killed process loses nothing that it wrote
    run_pipeline(pipeline(), root / "reference", root=root, stages=STAGES)
    run_pipeline(pipeline(weights_dtype="int8"), root / "older", root=root, stages=STAGES)
    for before in (None, root / "older"):
        for countdown in itertools.count(1):
            shutil.rmtree(root / "build", ignore_errors=True)
            if before:
                shutil.copytree(before, root / "build")
            killed = crash(root, countdown)
            for stage in STAGES:
                directory = root / "build" / stage.directory
                manifest = load_manifest(directory)
                assert manifest is not None or not directory.exists(), f"{countdown}: {stage.name} is half written"
                assert manifest is None or find_damage(directory, manifest, FileHasher()) is None
            run(root)
            assert names(root / "build") == {".lock", "checkpoint", "engine", "smoke"}, countdown
            assert artifacts(root / "build") == artifacts(root / "reference"), countdown
            if not killed:
                break
        print(f"{countdown - 1} kills")


def test_killed_runs_resume_to_the_same_artifacts(root: Path) -> None:
    here = Path(__file__).parent
    script = "import sys, pathlib, test_runner; test_runner.crash_everywhere(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(here), str(here.parents[1])])
    command = [sys.executable, "-c", script, str(root)]  # a process of its own, for it forks
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    over_nothing, over_older = (int(line.split()[0]) for line in done.stdout.splitlines())
    assert over_nothing > 50
    assert over_older > 20


def test_a_reproduction_names_the_checkpoint_wherever_it_runs(root: Path) -> None:
    run(root)
    text = (root / "build" / "engine" / "pipeline.yaml").read_text()
    assert f"checkpoint: {(root / 'model').resolve()}\n" in text
    script = root / "build" / "engine" / "reproduce.sh"
    assert os.access(script, os.X_OK)
    assert "--until build" in script.read_text()
    assert json.loads((root / "build" / "engine" / "manifest.json").read_text())["stage"] == "build"

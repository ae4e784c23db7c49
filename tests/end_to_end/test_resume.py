"""Runs that are killed, and runs with nothing to do."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.manifest import load_manifest
from draftline.stages.table import STAGES
from tests.end_to_end.conftest import PIPELINE_NAMES, PIPELINES
from tests.end_to_end.processes import traces_of, wait_for

pytestmark = pytest.mark.end_to_end

# In which stage to kill, and how many seconds after its beginning at most.
KILLS = (("convert", 3.0), ("convert", 3.0), ("check", 0.2), ("build", 0.3), ("package", 0.5), ("smoke", 2.0))


def run_command(output: Path) -> list[str]:
    file = PIPELINES / PIPELINE_NAMES["float32"]
    return [sys.executable, "-m", "draftline", "run", str(file), "--output", str(output)]


def output_hashes(build: Path) -> dict[str, str]:
    hashes = {}
    for stage in STAGES:
        manifest = load_manifest(build / stage.directory)
        assert manifest is not None, f"{stage.name} is not complete"
        hashes[stage.name] = manifest.outputs_sha256()
    return hashes


def kill_in_stage(output: Path, stage: str, delay: float) -> None:
    with subprocess.Popen(run_command(output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"{stage}: "):
                break
        time.sleep(delay)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert wait_for(lambda: not traces_of(process.pid), 10), traces_of(process.pid)


def test_a_run_that_was_killed_again_and_again_gives_the_same_outputs(
    build_of: Callable[[str], Path], tmp_path: Path
) -> None:
    seed = time.time_ns()
    print(f"seed {seed}")
    moments = random.Random(seed)
    for stage, longest in KILLS:
        kill_in_stage(tmp_path / "build", stage, moments.uniform(0.0, longest))
    subprocess.run(run_command(tmp_path / "build"), check=True, capture_output=True)
    assert output_hashes(tmp_path / "build") == output_hashes(build_of("float32"))
    left = [path.name for path in (tmp_path / "build").iterdir() if "partial" in path.name]
    assert not left
    shutil.rmtree(tmp_path / "build")  # 0.5 GB


def test_a_second_run_does_nothing_in_under_two_seconds(build_of: Callable[[str], Path]) -> None:
    build = build_of("float32")
    before = output_hashes(build)
    seconds = []
    for _ in range(3):  # other processes may slow one down
        started = time.monotonic()
        result = subprocess.run(run_command(build), check=True, capture_output=True, text=True)
        seconds.append(time.monotonic() - started)
        assert result.stderr.splitlines() == [f"{stage.name}: current" for stage in STAGES]
    assert min(seconds) < 2.0, seconds
    assert output_hashes(build) == before

"""An engine takes the cores that the process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftline.sessions import available_cores
from draftline.sessions.available_cores import choose_num_threads
from tests.sessions.tiny_engines import build_tiny_engine
from tests.tiny_checkpoints import write_tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, sys
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})  # of threads that start from here on
from pathlib import Path
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
session = OnnxRuntimeSession(Path(sys.argv[1]), load_engine_config(Path(sys.argv[1])))
assert all(os.sched_getaffinity(int(task)) == {core} for task in os.listdir("/proc/self/task"))
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two packages of two cores; 0 to 3 are the first threads of each core, 4 to 7 the second."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(available_cores, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return monkeypatch


@pytest.mark.parametrize(
    ("available", "num_threads"), [(range(8), 0), ([0], 1), ([0, 4], 1), ([0, 1], 2), ([0, 2], 2), (range(1, 8), 4)]
)
def test_cores_that_are_left_are_counted(machine: pytest.MonkeyPatch, available: list[int], num_threads: int) -> None:
    machine.setattr(os, "sched_getaffinity", lambda process: set(available))
    assert choose_num_threads(0) == num_threads
    assert choose_num_threads(3) == 3


def test_systems_that_do_not_say_are_served(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(os, "sched_getaffinity", lambda process: {0, 4})
    machine.setattr(available_cores, "TOPOLOGY", tmp_path / "nothing")
    assert choose_num_threads(0) == 2
    machine.delattr(os, "sched_getaffinity")
    assert choose_num_threads(0) == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_threads_stay_where_the_process_may_run(tmp_path: Path) -> None:
    engine = build_tiny_engine(tmp_path, write_tiny_checkpoint(tmp_path / "checkpoint"), num_threads=0)
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(engine)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr

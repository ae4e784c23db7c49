"""Parts in processes of their own: their time, their ends, and what is left of those that fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.bench.gpu.__main__ import run_parts, select_parts
from draftline.bench.gpu.findings import Finding
from draftline.bench.gpu.running import PartReport, allow_seconds, main, run_part
from draftline.bench.gpu.table import PARTS, Part
from draftline.errors import DraftlineError

KERNELS, OTHER = Part("one", "One", "none", 3), Part("two", "Two", "none", 1, needs="one")
PROGRAM = """
import sys, time
from pathlib import Path
from draftline.bench.gpu.findings import Finding, append_finding
output = Path(sys.argv[3])
append_finding(output / f"{sys.argv[1]}.jsonl", Finding("first", 0.5, "m", 1.0))
"""


def write_program(folder: Path, rest: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that tells one finding and goes on with ``rest``; return its name."""
    (folder / "played_part.py").write_text(PROGRAM + rest, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), *filter(None, sys.path)]))
    return "played_part"


@pytest.mark.parametrize(
    ("rest", "outcome", "error"),
    [
        ("", "ended", ""),
        ("print('CUDA: it broke', file=sys.stderr); sys.exit(1)", "failed", "CUDA: it broke"),
        ("import os; os.abort()", "failed", "ended with status -6"),
    ],
)
def test_what_a_part_told_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: str, outcome: str, error: str
) -> None:
    report = run_part(KERNELS, tmp_path, 60, write_program(tmp_path, rest, monkeypatch))
    assert (report.outcome, report.error) == (outcome, error)
    assert report.findings == (Finding("first", 0.5, "m", 1.0),)
    assert report.agrees == (outcome == "ended")


def test_a_part_that_hangs_is_ended_with_those_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = f"""
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3); open('{tmp_path}/alive', 'w')"])
time.sleep(60)
"""
    started = time.monotonic()
    report = run_part(KERNELS, tmp_path, 2, write_program(tmp_path, rest, monkeypatch))
    assert time.monotonic() - started < 20
    assert report.outcome == "stopped"
    assert not report.agrees
    assert len(report.findings) == 1
    time.sleep(3)
    assert not (tmp_path / "alive").exists()


def test_the_process_of_a_part_says_an_error_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here that of a part that needs a GPU."""
    assert main(["kernels", "--output", str(tmp_path), "--seconds", "9"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_check: this machine has an NVIDIA GPU and its driver; got no device of libcuda.so.1; ")


def test_every_part_has_its_function() -> None:
    for part in PARTS:
        assert callable(part.load())
        assert part.needs in {None, *(other.name for other in PARTS)}


@given(st.lists(st.floats(0, 1), min_size=len(PARTS), max_size=len(PARTS)), st.floats(1, 1000))
def test_the_time_is_never_exceeded(used: list[float], seconds: float) -> None:
    """Each part takes some of what it is allowed; the last one is allowed all that is left."""
    left = seconds
    for index, (part, share) in enumerate(zip(PARTS, used, strict=True)):
        allowed = allow_seconds(part, PARTS[index + 1 :], left)
        assert 0 <= allowed <= left + 1e-9
        assert index + 1 < len(PARTS) or allowed == pytest.approx(left)
        left -= share * allowed


def make_run(outcomes: dict[str, str], asked: list[tuple[str, float]]) -> object:
    def run(part: Part, output: Path, seconds: float) -> PartReport:
        asked.append((part.name, seconds))
        return PartReport(part.name, part.title, outcomes[part.name], 0.0, seconds, ())  # type: ignore[arg-type]

    return run


def test_a_part_without_what_it_needs_is_left_out(tmp_path: Path) -> None:
    asked: list[tuple[str, float]] = []
    said: list[str] = []
    last = Part("three", "Three", "none", 1)
    outcomes = {"one": "failed", "three": "ended"}
    run = make_run(outcomes, asked)
    one, two, three = run_parts([KERNELS, OTHER, last], tmp_path, 50, said.append, run)  # type: ignore[arg-type]
    assert (two.outcome, two.error, three.outcome) == ("left out", "one did not end", "ended")
    assert [name for name, _ in asked] == ["one", "three"]
    assert asked[0][1] == pytest.approx(30, abs=1)
    assert asked[1][1] == pytest.approx(50, abs=1)
    assert "two: LEFT OUT: one did not end" in said
    assert not one.agrees


def test_parts_are_chosen_by_name_and_run_in_their_order() -> None:
    assert [part.name for part in select_parts("bandwidth,kernels")] == ["kernels", "bandwidth"]
    assert len(select_parts(None)) == len(PARTS)
    with pytest.raises(DraftlineError, match=r"are some of kernels, commit, .*; got speeed, x; name parts with commas"):
        select_parts("kernels,speeed,x")

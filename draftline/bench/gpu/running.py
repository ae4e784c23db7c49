"""Run a part in a process of its own: one that crashes, hangs, or spoils its CUDA context leaves the others alone.

``python -m draftline.bench.gpu.running PART --output DIR --seconds N`` is that process. What it finds is in
``DIR/PART.jsonl`` as soon as it is found; what it and its libraries print is in ``DIR/PART.log``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftline.bench.gpu.findings import Finding, PartCall, append_finding, read_findings
from draftline.bench.gpu.table import PARTS, Part
from draftline.errors import DraftlineError

Outcome = Literal["ended", "failed", "stopped", "left out"]
GRACE_SHARE, MOST_GRACE_SECONDS = 0.2, 10.0  # of a part's time, between its deadline and its end by force


@dataclass(frozen=True)
class PartReport:
    """What came of a part. ``stopped``: by force, at the end of ``allowed_seconds``. ``error``: why it failed."""

    name: str
    title: str
    outcome: Outcome
    seconds: float
    allowed_seconds: float
    findings: tuple[Finding, ...]
    error: str = ""

    @property
    def agrees(self) -> bool:
        return self.outcome == "ended" and not any(finding.agrees is False for finding in self.findings)


def allow_seconds(part: Part, following: Sequence[Part], seconds_left: float) -> float:
    """Return the seconds of ``part`` where ``following`` come after it: what parts before it saved is shared by all.

    >>> first, second = PARTS[0], PARTS[1]
    >>> allow_seconds(first, [second], 56) == 56 * first.share / (first.share + second.share)
    True
    """
    return max(0.0, seconds_left) * part.share / (part.share + sum(other.share for other in following))


def run_part(part: Part, output: Path, seconds: float, module: str = "draftline.bench.gpu.running") -> PartReport:
    """Run ``part`` for ``seconds`` at most; ``module``: what is run in the process."""
    findings, log = output / f"{part.name}.jsonl", output / f"{part.name}.log"
    findings.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, part.name, "--output", str(output), "--seconds", f"{seconds:.1f}"]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    taken = round(time.monotonic() - started, 1)
    outcome: Outcome = "stopped" if status is None else "failed" if status else "ended"
    error = ""
    if outcome == "failed":
        error = _last_line(log) or f"ended with status {status}"
    return PartReport(part.name, part.title, outcome, taken, round(seconds, 1), tuple(read_findings(findings)), error)


def leave_out(part: Part, reason: str) -> PartReport:
    return PartReport(part.name, part.title, "left out", 0.0, 0.0, (), reason)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and those it started: they are a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftline.bench.gpu.running", description=__doc__)
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + options.seconds - min(GRACE_SHARE * options.seconds, MOST_GRACE_SECONDS)
    path = options.output / f"{options.part}.jsonl"
    part = next(part for part in PARTS if part.name == options.part)

    def tell(finding: Finding) -> None:
        append_finding(path, finding)

    try:
        part.load()(PartCall(options.output, deadline, tell))
    except DraftlineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

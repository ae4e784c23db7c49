"""``python -m draftline.bench.gpu``: what ``scripts/gpu_check`` runs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from draftline.bench.gpu.device import driver_release, open_gpu
from draftline.bench.gpu.report import CheckReport, describe_findings, write_check
from draftline.bench.gpu.running import PartReport, allow_seconds, leave_out, run_part
from draftline.bench.gpu.table import PARTS, Part
from draftline.bench.machine import PACKAGES, describe_machine
from draftline.errors import DraftlineError

GPU_PACKAGES = (*PACKAGES, "triton", "tensorrt-cu13", "tensorrt-rtx-cu13")
CLOSING_SECONDS = 5.0  # to write what was found
Say = Callable[[str], None]
RunPart = Callable[[Part, Path, float], PartReport]


def run_parts(
    parts: Sequence[Part], output: Path, seconds: float, say: Say, run: RunPart = run_part
) -> tuple[PartReport, ...]:
    """Run ``parts`` one after the other within ``seconds``; a part is left out where one that it needs did not end."""
    ends = time.monotonic() + seconds
    reports: list[PartReport] = []
    for index, part in enumerate(parts):
        missing = [other for other in reports if other.name == part.needs and other.outcome != "ended"]
        if missing:
            reports.append(leave_out(part, f"{missing[0].name} did not end"))
        else:
            allowed = allow_seconds(part, parts[index + 1 :], ends - time.monotonic())
            say(f"{part.name}: {part.title}, {allowed:.0f} s at most")
            reports.append(run(part, output, allowed))
        describe_findings(reports[-1], say)
    return tuple(reports)


def select_parts(names: str | None) -> list[Part]:
    """Return the parts of a list with commas, None = all. Raises: DraftlineError for an unknown name."""
    if names is None:
        return list(PARTS)
    known = {part.name: part for part in PARTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        cure = "name parts with commas"
        raise DraftlineError("gpu_check --parts", f"are some of {', '.join(known)}", ", ".join(unknown), cure)
    return [part for name, part in known.items() if name in names.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Return 0 where all agrees, 1 where something does not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for all of it (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("builds/gpu-check"), metavar="DIR", help="%(default)s")
    parser.add_argument("--parts", help=f"some of {','.join(part.name for part in PARTS)} (default: all)")
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if not options.minutes > 0:
            raise DraftlineError("gpu_check --minutes", "is above 0", options.minutes, "8 are enough for all parts")
        parts = select_parts(options.parts)
        gpu = open_gpu()
    except DraftlineError as error:
        say(str(error))
        return 2
    card = {
        "name": gpu.name,
        "architecture": gpu.architecture,
        "memory_gib": round(gpu.memory_bytes / 2**30, 1),
        "driver": driver_release(),
        "cuda": gpu.cuda_version,
    }
    machine = describe_machine(GPU_PACKAGES)
    options.output.mkdir(parents=True, exist_ok=True)
    reports = run_parts(parts, options.output, 60 * options.minutes - CLOSING_SECONDS, say)
    report = CheckReport(
        card,
        machine,
        datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        shlex.join(["scripts/gpu_check", *(sys.argv[1:] if arguments is None else arguments)]),
        round(time.monotonic() - started, 1),
        reports,
    )
    write_check(report, options.output)
    say(f"gpu_check: {'everything agrees' if report.agrees else 'NOT everything agrees'}; see {options.output}")
    return 0 if report.agrees else 1


if __name__ == "__main__":
    sys.exit(main())

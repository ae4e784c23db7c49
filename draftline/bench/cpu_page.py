"""``python -m draftline.bench.cpu_page [DIR]``: publish a run of ``scripts/bench_cpu``.

Its files become ``docs/bench/cpu.json`` and ``cpu.png``, and its numbers go into the pages that show them.

A page shows them between the lines ``<!-- cpu.json: NAME -->`` and ``<!-- end -->``, NAME one of ``BLOCKS``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from draftline.bench.cpu_decode import BANDWIDTH, DRAFTLINE, FLOOR_GOALS, OPENVINO, TRANSFORMERS
from draftline.bench.cpu_report import DECODE, STEP
from draftline.bench.pages import fill_blocks, write_markdown_table
from draftline.bench.report import Report, describe_run, load_report, spread
from draftline.bench.rounds import Measurement, Ratio
from draftline.errors import DraftlineError

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "docs" / "bench" / "cpu.json"
PAGES = (ROOT / "docs" / "cpu.md", ROOT / "README.md")
NOT_MEASURED = "*Not measured yet: these numbers want a quiet machine.*"
_PROFILE = re.compile(r"profile: (\w+), batch (\d+)")
_SUMMARY_BATCHES = (1, 8, 16)
_LEAST_MS = 0.05  # operators below it in every profile are summed


def fill_page(page: str, report: Report | None) -> str:
    """Return ``page`` with the blocks that ``report`` gives; None: nothing was measured.

    Raises: DraftlineError for a block of an unknown name.

    >>> print(fill_page("<!-- cpu.json: goals -->\\nold\\n<!-- end -->", None))
    <!-- cpu.json: goals -->
    <BLANKLINE>
    *Not measured yet: these numbers want a quiet machine.*
    <BLANKLINE>
    <!-- end -->
    """
    return fill_blocks(page, NUMBERS.name, report, BLOCKS, NOT_MEASURED)


def _run(report: Report) -> list[str]:
    """The machine, the versions, what to know of the run, and where all of it is."""
    lines = describe_run(report)
    if bandwidths := [value for one in report.measurements if one.system.startswith(BANDWIDTH) for value in one.values]:
        lines.append(f"read bandwidth {spread(bandwidths, 1)} GB/s, measured around each of this engine's turns")
    return [*(f"- {line}" for line in lines), "- [all numbers](bench/cpu.json), [plot](bench/cpu.png)"]


def _decode(report: Report) -> list[str]:
    lines: list[str] = []
    speeds = _speeds(report)
    for precision in FLOOR_GOALS:
        mine = f"{DRAFTLINE} {precision}"
        references = [f"floor {precision}", f"{OPENVINO} {precision}", TRANSFORMERS]
        rows = [
            [f"batch {size}, context {context}", f"{_median(speeds[workload][mine])} tokens/s"]
            + [_ratio(report, workload, mine, reference) for reference in references]
            for workload, (size, context) in _cases(report).items()
            if mine in speeds[workload]
        ]
        if rows:
            title = [precision, "draftline", "/ floor", f"/ `{OPENVINO}`", "/ `transformers`, float32"]
            lines += [*write_markdown_table(title, rows), ""]
    return lines[:-1]


def _summary(report: Report) -> list[str]:
    """The shortest context, in a few columns."""
    cases, speeds = _cases(report), _speeds(report)
    shortest = min((context for _, context in cases.values()), default=0)
    shown = {
        size: workload
        for workload, (size, context) in cases.items()
        if size in _SUMMARY_BATCHES and context == shortest
    }
    rows = []
    for precision in FLOOR_GOALS:
        mine = f"{DRAFTLINE} {precision}"
        measured = {size: workload for size, workload in shown.items() if mine in speeds[workload]}
        if not measured:
            continue
        rows.append([f"draftline {precision}", *(f"{_median(speeds[w][mine])} tokens/s" for w in measured.values())])
        for title, reference in (
            ("/ floor", f"floor {precision}"),
            (f"/ `{OPENVINO}`", f"{OPENVINO} {precision}"),
            ("/ `transformers`, float32", TRANSFORMERS),
        ):
            rows.append([title, *(_ratio(report, workload, mine, reference) for workload in measured.values())])
    return write_markdown_table(["", *(f"batch {size}" for size in shown)], rows) if shown else []


def _curve(report: Report) -> list[str]:
    """The time of a step of T tokens over that of one."""
    counts = {one.workload: int(match[1]) for one in report.measurements if (match := STEP.match(one.workload))}
    systems = dict.fromkeys(one.system for one in report.measurements if one.workload in counts)
    one_token = next((workload for workload, count in counts.items() if count == 1), "")
    rows = []
    for system in systems:
        measured = next(one for one in report.measurements if (one.system, one.workload) == (system, one_token))
        ratios = [_ratio(report, workload, system, one_token) for workload in counts if workload != one_token]
        rows.append([system, f"{_median(measured)} ms", *ratios])
    return write_markdown_table(["", *(f"T = {count}" for count in counts.values())], rows) if rows else []


def _attention(report: Report) -> list[str]:
    rows = [
        [f"{ratio.workload}, {ratio.system}", spread(ratio.values, 2), f"{ratio.goal:g} at most, {_verdict(ratio)}"]
        for ratio in report.ratios
        if ratio.workload.startswith("forward, ")
    ]
    return write_markdown_table(["", "whole / without attention", "goal"], rows) if rows else []


def _profile(report: Report) -> list[str]:
    profiles = {
        f"{match[1]}, batch {match[2]}": numbers
        for title, numbers in report.findings.items()
        if (match := _PROFILE.match(title))
    }
    kinds = list(dict.fromkeys(kind for numbers in profiles.values() for kind in numbers))
    large = [kind for kind in kinds if any(numbers.get(kind, 0.0) >= _LEAST_MS for numbers in profiles.values())]
    rows = [[f"`{kind}`", *(_ms(numbers.get(kind)) for numbers in profiles.values())] for kind in large]
    small = [sum(ms for kind, ms in numbers.items() if kind not in large) for numbers in profiles.values()]
    rows += [["others", *map(_ms, small)], ["all", *(_ms(sum(numbers.values())) for numbers in profiles.values())]]
    return write_markdown_table(["ms", *profiles], rows) if profiles else []


def _goals(report: Report) -> list[str]:
    goals = [ratio for ratio in report.ratios if ratio.goal is not None]
    missed = [ratio for ratio in goals if not ratio.passed]
    rows = [
        [f"{ratio.workload}: {ratio.system} / {ratio.reference}", spread(ratio.values, 2), _wanted(ratio)]
        for ratio in missed
    ]
    count = f"{len(goals) - len(missed)} of {len(goals)} goals were met."
    return [count, "", *write_markdown_table(["missed", "measured", "goal"], rows)] if missed else [count]


BLOCKS: dict[str, Callable[[Report], list[str]]] = {
    "run": _run,
    "goals": _goals,
    "decode": _decode,
    "curve": _curve,
    "attention": _attention,
    "profile": _profile,
    "summary": _summary,
}


def _cases(report: Report) -> dict[str, tuple[int, int]]:
    """Workload -> batch and context."""
    return {
        one.workload: (int(match[1]), int(match[2]))
        for one in report.measurements
        if (match := DECODE.match(one.workload))
    }


def _speeds(report: Report) -> dict[str, dict[str, Measurement]]:
    """Workload -> system -> what was measured."""
    found: dict[str, dict[str, Measurement]] = {}
    for one in report.measurements:
        found.setdefault(one.workload, {})[one.system] = one
    return found


def _ratio(report: Report, workload: str, system: str, reference: str) -> str:
    """Write the ratio with its spread, in bold where a goal was met, with the goal where it was not."""
    wanted = (workload, system, reference)
    found = next((r for r in report.ratios if (r.workload, r.system, r.reference) == wanted), None)
    if found is None:
        return "not measured"
    middle, between = spread(found.values, 2).split(" ", 1)
    if found.goal is None:
        return f"{middle} {between}"
    return f"**{middle}** {between}" if found.passed else f"{middle} {between}, goal {found.goal:g}"


def _verdict(ratio: Ratio) -> str:
    return "met" if ratio.passed else "missed"


def _wanted(ratio: Ratio) -> str:
    return f"{ratio.goal:g} at {'most' if ratio.at_most else 'least'}"


def _median(measurement: Measurement) -> str:
    return f"{statistics.median(measurement.values):.1f}"


def _ms(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish a run, or fill the pages anew; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="cpu_page", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="DIR", help="copy a run of scripts/bench_cpu first")
    run: Path | None = parser.parse_args(arguments).run
    try:
        report = load_report(NUMBERS if run is None else run / "bench.json")
        filled = {page: fill_page(page.read_text(encoding="utf-8"), report) for page in PAGES}
    except DraftlineError as error:
        print(f"cpu_page: {error}", file=sys.stderr)
        return 2
    if run is not None:
        for suffix in (".json", ".png"):
            shutil.copyfile(run / f"bench{suffix}", NUMBERS.with_suffix(suffix))
    for page, text in filled.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

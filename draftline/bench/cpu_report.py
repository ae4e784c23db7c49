"""What the CPU benchmark shows: tables of speeds and ratios, and a page of panels."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftline.bench.report import Report, describe_run, import_matplotlib, spread
from draftline.bench.rounds import Measurement

DECODE = re.compile(r"decode, batch (\d+), context (\d+)")
STEP = re.compile(r"step of (\d+) tokens")


def write_cpu_table(report: Report) -> str:
    """Return the report as text: speeds, ratios to others, goals, findings."""
    lines = [*describe_run(report), ""]
    lines += _speeds(report, "tokens/s")
    lines += _speeds(report, "ms")
    lines += ["", "ratios: median [lowest, highest]"]
    for ratio in report.ratios:
        label = f"{ratio.workload}: {ratio.system} / {ratio.reference}"
        goal = "" if ratio.goal is None else f"goal {'<=' if ratio.at_most else '>='} {ratio.goal:g}: "
        verdict = "" if ratio.passed is None else "pass" if ratio.passed else "FAIL"
        lines.append(f"  {label:<92} {spread(ratio.values, 2):>20}  {goal}{verdict}".rstrip())
    goals = [ratio for ratio in report.ratios if ratio.goal is not None]
    lines += ["", f"goals met: {sum(bool(ratio.passed) for ratio in goals)} of {len(goals)}"]
    for title, numbers in report.findings.items():
        lines += ["", title, *(f"  {name:<40} {number:>9.3f}" for name, number in numbers.items())]
    return "\n".join([*lines, "", report.how_to_read])


def _speeds(report: Report, unit: str) -> list[str]:
    """A row for each workload, a column for each system: medians."""
    shown = [one for one in report.measurements if one.unit in (unit, *(["GB/s"] if unit == "tokens/s" else []))]
    lines: list[str] = []
    blocks: dict[tuple[str, ...], dict[str, dict[str, Measurement]]] = {}
    by_workload: dict[str, dict[str, Measurement]] = {}
    for one in shown:
        by_workload.setdefault(one.workload, {})[one.system] = one
    all_names = list(dict.fromkeys(one.system for one in shown)) if unit == "tokens/s" else None
    for workload, row in by_workload.items():
        blocks.setdefault(tuple(all_names or row), {})[workload] = row
    for names, rows in blocks.items():
        lines += ["", f"{unit}, median over the rounds" + (" (read bandwidth: GB/s)" if unit == "tokens/s" else "")]
        lines.append(" " * 42 + "".join(f"{_short(name):>20}" for name in names))
        for workload, row in rows.items():
            cells = (f"{statistics.median(row[name].values):.1f}" if name in row else "cut" for name in names)
            lines.append(f"  {workload:<40}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


def _short(name: str) -> str:
    shorter = {"draftline": "draftline", "openvino-genai": "openvino", "transformers": "transformers", "read": "read"}
    words = name.replace("float32", "fp32").replace("bandwidth", "bw").replace("no attention", "none").split()
    return " ".join([shorter.get(words[0], words[0]), *words[1:]])


def draw_cpu_report(report: Report, path: Path) -> None:
    """Draw decode speeds by batch, a panel for each context; under them the cost curve, attention, and profiles."""
    decode = _decode_series(report)
    contexts = list(decode)
    columns = max(3, len(contexts))
    figure = import_matplotlib().Figure(figsize=(5 * columns, 9), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False)
    for panel in panels.flat:
        panel.set_axis_off()
    systems = list(dict.fromkeys(name for series in decode.values() for name in series))
    for panel, context in zip(panels[0], contexts, strict=False):
        panel.set_axis_on()
        for name, points in decode[context].items():
            style = "--" if name.startswith("floor") else "-"
            sizes, speeds = [size for size, _ in points], [one for _, one in points]
            color = f"C{systems.index(name)}"
            medians = [statistics.median(one.values) for one in speeds]
            panel.plot(sizes, medians, style, marker=None if style == "--" else "o", color=color, label=name)
            panel.fill_between(
                sizes, [min(one.values) for one in speeds], [max(one.values) for one in speeds], color=color, alpha=0.15
            )
        panel.set(xscale="log", yscale="log", xlabel="batch")
        sizes = sorted({size for points in decode[context].values() for size, _ in points})
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.set_title(f"decode, context {context} (tokens/s)", loc="left", fontsize=10)
        panel.grid(alpha=0.3)
    if contexts:
        panels[0, 0].legend(fontsize=8)
    _draw_curve(panels[1, 0], report)
    _draw_attention(panels[1, 1], report)
    _draw_profiles(panels[1, 2], report)
    machine = report.machine
    figure.suptitle(f"{machine['processor']}, {machine['num_cores']} cores; median, lowest and highest", fontsize=11)
    figure.savefig(path, dpi=120)


def _decode_series(report: Report) -> dict[int, dict[str, list[tuple[int, Measurement]]]]:
    """Context -> system -> batch sizes and their measurements."""
    found: dict[int, dict[str, list[tuple[int, Measurement]]]] = {}
    for one in report.measurements:
        match = DECODE.match(one.workload)
        if match and one.unit == "tokens/s":
            size, context = int(match[1]), int(match[2])
            found.setdefault(context, {}).setdefault(one.system, []).append((size, one))
    return found


def _draw_curve(panel: Any, report: Report) -> None:
    curves: dict[str, list[tuple[int, Sequence[float]]]] = {}
    for ratio in report.ratios:
        match = STEP.match(ratio.workload)
        if match:
            curves.setdefault(ratio.system, [(1, (1.0,))]).append((int(match[1]), ratio.values))
    if not curves:
        return
    panel.set_axis_on()
    for name, points in curves.items():
        rows = [num_rows for num_rows, _ in points]
        color = f"C{0 if name.endswith('float32') else 1}"
        style = "-" if name.startswith("native") else ":"
        panel.plot(
            rows, [statistics.median(values) for _, values in points], style, marker="o", color=color, label=name
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(rows, [str(num_rows) for num_rows in rows])
    panel.set_title("time of a step of T tokens / of one token", loc="left", fontsize=10)
    panel.set_xlabel("T")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)


def _draw_attention(panel: Any, report: Report) -> None:
    shown = [ratio for ratio in report.ratios if ratio.workload.startswith("forward, ")]
    if not shown:
        return
    panel.set_axis_on()
    for place, ratio in enumerate(shown):
        middle, low, high = statistics.median(ratio.values), min(ratio.values), max(ratio.values)
        panel.bar(place, middle, yerr=[[middle - low], [high - middle]], capsize=4, color="C0", width=0.6)
        assert ratio.goal is not None
        panel.hlines(ratio.goal, place - 0.4, place + 0.4, color="C3", label="goal" if place == 0 else None)
    labels = [
        f"{ratio.workload.removeprefix('forward, ')}\n{ratio.system}".replace(", context", "\ncontext")
        for ratio in shown
    ]
    panel.set_xticks(range(len(shown)), labels, fontsize=8)
    panel.set_title("forward / the same graph without attention", loc="left", fontsize=10)
    panel.legend(fontsize=8)


def _draw_profiles(panel: Any, report: Report) -> None:
    profiles = {title: numbers for title, numbers in report.findings.items() if title.startswith("profile: ")}
    if not profiles:
        return
    panel.set_axis_on()
    totals: dict[str, float] = {}
    for numbers in profiles.values():
        for name, number in numbers.items():
            totals[name] = totals.get(name, 0.0) + number
    kinds = sorted(totals, key=lambda name: -totals[name])[:9]
    bottoms = [0.0] * len(profiles)
    for index, kind in enumerate([*kinds, "others"]):
        heights = [
            numbers.get(kind, 0.0)
            if kind != "others"
            else sum(number for name, number in numbers.items() if name not in kinds)
            for numbers in profiles.values()
        ]
        panel.bar(range(len(profiles)), heights, bottom=bottoms, label=kind, color=f"C{index}", width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    labels = [title.removeprefix("profile: ").split(", context")[0].replace(", ", "\n") for title in profiles]
    panel.set_xticks(range(len(profiles)), labels, fontsize=8)
    panel.set_title("ms of a forward by operator, context 512", loc="left", fontsize=10)
    panel.legend(fontsize=7)

"""What a benchmark leaves: a table in the terminal, ``bench.json``, ``bench.png``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from draftline.bench.rounds import Measurement, Ratio
from draftline.checkpoints.optional_package import import_optional
from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

Entry = TypeVar("Entry", Measurement, Ratio)

BUSY = 0.5  # load average of the last minute; transformers loses far more to neighbours than the engine does

HOW_TO_READ = """\
Decode speeds leave the prefill out on all sides: they count the tokens of the whole batch from the moment when every
answer has its first token until the first answer has its last. Every round measures all systems one after another, in
a turning order; a ratio divides numbers of the same round. Numbers are the median over the rounds, with the lowest and
the highest in brackets; a goal is met where the median reaches it. All systems decode greedily, transformers with the
same float32 weights. Speeds are better when higher, times to the first token when lower; every first token comes after
another prompt, so that no cached prefix helps. "over gRPC" goes through the Triton server and the whole ensemble,
streaming every token; it is compared with the engine that was measured in turn with it, beside its server."""


@dataclass(frozen=True)
class Report:
    """``findings``: named numbers beside the measurements, by title. ``notes``: what a reader must know of this run."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    measurements: tuple[Measurement, ...]
    ratios: tuple[Ratio, ...]
    findings: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    how_to_read: str = HOW_TO_READ
    notes: tuple[str, ...] = ()


def describe_run(report: Report) -> list[str]:
    """Return lines on the machine, the versions, and what to know of the run."""
    machine = report.machine
    flags = " ".join(name for name, present in machine["flags"].items() if present) or "none of those that matter"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['processor']}, {machine['num_cores']} cores, {machine['memory_gib']} GiB; flags: {flags}",
        f"Python {machine['python']}, {versions}",
    ]
    load = machine["load_average"][0]
    if load > BUSY:
        lines.append(
            f"The machine was busy before the first round (load average {load:.1f}): do not quote these numbers."
        )
    return [*lines, *report.notes]


def write_table(report: Report) -> str:
    """Return the report as text."""
    lines = describe_run(report)
    for workload in dict.fromkeys(measurement.workload for measurement in report.measurements):
        lines += ["", workload]
        for measurement in report.measurements:
            if measurement.workload == workload:
                lines.append(f"  {measurement.system:<34} {spread(measurement.values, 1):>28} {measurement.unit}")
    lines += ["", "ratios"]
    for ratio in report.ratios:
        verdict = "" if ratio.goal is None else f"goal {ratio.goal:g}: {'pass' if ratio.passed else 'FAIL'}"
        label = f"{ratio.workload}: {ratio.system} / {ratio.reference}"
        lines.append(f"  {label:<88} {spread(ratio.values, 2):>20}  {verdict}".rstrip())
    for title, numbers in report.findings.items():
        lines += ["", title, *(f"  {name:<34} {number:>10.3f}" for name, number in numbers.items())]
    return "\n".join([*lines, "", report.how_to_read])


def write_report(report: Report, directory: Path, draw: Callable[[Report, Path], None] | None = None) -> None:
    """Write ``bench.json`` and ``bench.png``, by ``draw`` or in bars; each is under its name only when it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": report.machine,
        "settings": report.settings,
        "measurements": [asdict(measurement) | _summary(measurement.values) for measurement in report.measurements],
        "ratios": [asdict(ratio) | _summary(ratio.values) | {"passed": ratio.passed} for ratio in report.ratios],
        "findings": {title: dict(numbers) for title, numbers in report.findings.items()},
        "notes": list(report.notes),
        "how_to_read": report.how_to_read,
    }
    text = json.dumps(document, indent=2) + "\n"
    with replace_file(directory / "bench.json") as partial:
        partial.write_text(text, encoding="utf-8")
    with replace_file(directory / "bench.png") as partial:
        (draw or _draw)(report, partial)


def load_report(path: Path) -> Report:
    """Read the report that ``write_report`` wrote to the JSON file ``path``.

    Raises: ArtifactError where there is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Report(
            document["machine"],
            document["settings"],
            tuple(_read(Measurement, entry) for entry in document["measurements"]),
            tuple(_read(Ratio, entry) for entry in document["ratios"]),
            document["findings"],
            document["how_to_read"],
            tuple(document["notes"]),
        )
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise ArtifactError(path, "is the bench.json of a benchmark", repr(error), "run the benchmark again") from error


def _read(kind: type[Entry], entry: Mapping[str, Any]) -> Entry:
    values = {field.name: entry[field.name] for field in fields(kind)}
    return kind(**values | {"values": tuple(entry["values"])})


def import_matplotlib() -> Any:
    """Return ``matplotlib.figure``, or raise MissingPackageError."""
    return import_optional("matplotlib.figure", "the plot of a benchmark", "pip install 'draftline[bench]'")


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread(values: Sequence[float], digits: int) -> str:
    """Write the median, with the lowest and the highest in brackets."""
    numbers = (f"{number:.{digits}f}" for number in (statistics.median(values), min(values), max(values)))
    return "{} [{}, {}]".format(*numbers)


def _draw(report: Report, path: Path) -> None:
    """Draw one panel per workload: a bar per system at its median, with a whisker from its lowest to its highest."""
    workloads = list(dict.fromkeys(measurement.workload for measurement in report.measurements))
    systems = list(dict.fromkeys(measurement.system for measurement in report.measurements))
    height = 0.8 + 0.32 * len(systems)
    figure = import_matplotlib().Figure(figsize=(9, height * len(workloads)), layout="constrained")
    panels = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for panel, workload in zip(panels, workloads, strict=True):
        shown = [measurement for measurement in report.measurements if measurement.workload == workload]
        for place, measurement in enumerate(reversed(shown)):
            middle, low, high = _summary(measurement.values).values()
            color = f"C{systems.index(measurement.system)}"
            panel.barh(place, middle, xerr=[[middle - low], [high - middle]], color=color, height=0.7, capsize=3)
            panel.annotate(f" {middle:.1f}", (high, place), va="center", fontsize=9)
        panel.set_yticks(range(len(shown)), [measurement.system for measurement in reversed(shown)], fontsize=9)
        panel.set_title(f"{workload} ({shown[0].unit})", loc="left", fontsize=10)
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    machine = report.machine
    figure.suptitle(f"{machine['processor']}, {machine['num_cores']} cores; median, lowest and highest", fontsize=10)
    figure.savefig(path, dpi=150)

"""What the check leaves: ``gpu-check.json``, and ``gpu-check.md`` with the same in tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.bench.gpu.findings import Finding
from draftline.bench.gpu.running import PartReport
from draftline.bench.pages import write_markdown_table
from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

JSON_FILE, PAGE_FILE = "gpu-check.json", "gpu-check.md"
HOW_TO_READ = (
    "A comparison agrees where its number is at most its limit. Bytes are those that any kernel must move, and a share "
    "is of what memory clock and bus allow. Parts end when their time does; notes say how far they came."
)


@dataclass(frozen=True)
class CheckReport:
    """``card``: name, compute capability, memory, driver, CUDA. ``machine``: processor and versions. ``date``: UTC."""

    card: dict[str, Any]
    machine: dict[str, Any]
    date: str
    command: str
    seconds: float
    parts: tuple[PartReport, ...]

    @property
    def agrees(self) -> bool:
        """Whether every part came to its end and every comparison agreed."""
        return bool(self.parts) and all(part.agrees for part in self.parts)


def write_check(report: CheckReport, directory: Path) -> None:
    """Write both files, each under its name only when it is whole."""
    document = asdict(report) | {"agrees": report.agrees}
    for part in document["parts"]:
        for finding in part["findings"]:
            finding["value"] = finding["value"] if math.isfinite(finding["value"]) else None
    with replace_file(directory / JSON_FILE) as partial:
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    with replace_file(directory / PAGE_FILE) as partial:
        partial.write_text("\n".join(["# scripts/gpu_check", "", *write_page(report), ""]), encoding="utf-8")


def load_check(path: Path) -> CheckReport:
    """Read what ``write_check`` wrote. Raises: ArtifactError where ``path`` is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        del document["agrees"]
        parts = []
        for part in document.pop("parts"):
            findings = [
                Finding(**entry | {"value": math.nan if entry["value"] is None else entry["value"]})
                for entry in part.pop("findings")
            ]
            parts.append(PartReport(**part, findings=tuple(findings)))
        return CheckReport(**document, parts=tuple(parts))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(path, f"is the {JSON_FILE} of a check", repr(error), "run scripts/gpu_check") from error


def write_page(report: CheckReport) -> list[str]:
    """Return the lines of the page, without a title."""
    card, machine = report.card, report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"- {card['name']}, compute capability {card['architecture'] / 10:.1f}, {card['memory_gib']:.0f} GiB; driver "
        f"{card['driver']}, CUDA {card['cuda']}",
        f"- {machine['processor']}, {machine['num_cores']} cores; Python {machine['python']}, {versions}",
        f"- {report.date}, `{report.command}`, {report.seconds:.0f} s",
        f"- {'Everything agrees.' if report.agrees else 'NOT everything agrees.'} {HOW_TO_READ}",
    ]
    for part in report.parts:
        lines += ["", f"## {part.title}", "", _describe(part)]
        if part.findings:
            title = ["what", "found", "limit", "agrees", "note"]
            lines += ["", *write_markdown_table(title, [_cells(finding) for finding in part.findings])]
    return lines


def _describe(part: PartReport) -> str:
    ends = {
        "ended": "Ended",
        "stopped": "Stopped by force",
        "failed": f"FAILED: {part.error};",
        "left out": f"LEFT OUT: {part.error}",
    }
    if part.outcome == "left out":
        return ends[part.outcome]
    return f"{ends[part.outcome]} after {part.seconds:.0f} of {part.allowed_seconds:.0f} s."


def _cells(finding: Finding) -> list[str]:
    verdicts = {None: "", True: "yes", False: "**NO**"}
    limit = "" if finding.limit is None else f"{finding.limit:.4g}"
    note = finding.note.replace("|", "\\|").replace("\n", " ")
    return [finding.what, f"{finding.value:.4g} {finding.unit}".rstrip(), limit, verdicts[finding.agrees], note]


def describe_findings(part: PartReport, say: Callable[[str], None]) -> None:
    """Say what a part found, for the terminal."""
    say(f"{part.name}: {_describe(part)}")
    for finding in part.findings:
        what, found, limit, _, note = _cells(finding)
        comparison = f" (limit {limit}: {'agrees' if finding.agrees else 'DIFFERS'})" if limit else ""
        say(f"  {what}: {found}{comparison}{f'; {note}' if note else ''}")

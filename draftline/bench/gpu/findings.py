"""What a part of the check found: lines of a table, kept as they are found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Finding:
    """A comparison or a measurement. ``limit``: the largest ``value`` that agrees; None of a measurement."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """Whether a comparison is within its limit, which no NaN is; None of a measurement."""
        return None if self.limit is None else self.value <= self.limit


@dataclass(frozen=True)
class PartCall:
    """What a part is given: the folder of the run, when it should end, and whom it tells what it finds.

    ``deadline``: a second of ``time.monotonic``; a part that outlasts it by far is ended by force, and what it told by
    then stands.
    """

    output: Path
    deadline: float
    tell: Callable[[Finding], None]

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def tell_left_out(self, count: int, what: str) -> None:
        """Tell that ``count`` comparisons were not made, which is no agreement."""
        self.tell(Finding(f"{what} that were left out", count, "for lack of time", 0, "give the check more --minutes"))


def append_finding(path: Path, finding: Finding) -> None:
    """Append a finding to a file of JSON lines; numbers that JSON has no word for become null."""
    fields = asdict(finding)
    if not math.isfinite(finding.value):
        fields["value"] = None
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def read_findings(path: Path) -> list[Finding]:
    """Read what ``append_finding`` wrote; none where there is no file. A last line that was cut is left out."""
    if not path.exists():
        return []
    findings = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        fields = json.loads(line)
        findings.append(Finding(**fields | {"value": math.nan if fields["value"] is None else fields["value"]}))
    return findings

"""What a measurement of acceptance leaves: a table, ``acceptance.json``, ``acceptance.png``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftline.bench.report import import_matplotlib
from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

HOW_TO_READ = """\
acceptance_length counts a step's accepted draft tokens and the token that the target adds, mean over all steps of all
answers. acceptance_rate_at[d] is the share of steps whose draft token of depth d was accepted, those where nothing was
drafted included; acceptance_rate is accepted / drafted. Every step drafts a chain, shorter only where an answer has
less left, and Medusa's where it has fewer heads; n-gram lookup drafts only where it finds something. Decoding is
greedy, so all answers are the same text."""


@dataclass(frozen=True)
class Acceptance:
    """One draft on one held-out set; see the glossary for the names."""

    draft: str
    method: str
    held_out: str
    num_prompts: int
    num_tokens: int
    num_steps: int
    acceptance_length: float
    acceptance_rate: float
    acceptance_rate_at: tuple[float, ...]
    drafted_per_step: float


@dataclass(frozen=True)
class AcceptanceReport:
    machine: dict[str, Any]
    settings: dict[str, Any]
    acceptances: tuple[Acceptance, ...]


def write_table(report: AcceptanceReport) -> str:
    """Return the report as text, a block for each held-out set."""
    lines: list[str] = []
    for held_out in dict.fromkeys(entry.held_out for entry in report.acceptances):
        entries = [entry for entry in report.acceptances if entry.held_out == held_out]
        depths = "".join(f"{f'at[{depth}]':>8}" for depth in range(1, len(entries[0].acceptance_rate_at) + 1))
        lines.append(
            f"{held_out}: {entries[0].num_prompts} prompts, {entries[0].num_tokens} tokens, greedy, "
            f"{report.settings['weights_dtype']}"
        )
        lines.append(f"  {'draft':<34}{'length':>8}{depths}{'rate':>8}{'drafted':>9}")
        for entry in entries:
            rates = "".join(f"{rate:>8.3f}" for rate in entry.acceptance_rate_at)
            lines.append(
                f"  {entry.draft:<34}{entry.acceptance_length:>8.3f}{rates}{entry.acceptance_rate:>8.3f}"
                f"{entry.drafted_per_step:>9.2f}"
            )
        lines.append("")
    return "\n".join([*lines, HOW_TO_READ])


def write_report(report: AcceptanceReport, directory: Path) -> None:
    """Write both files; each is under its name only when it is whole.

    Raises: MissingPackageError without matplotlib.
    """
    import_matplotlib()
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(report) | {"how_to_read": HOW_TO_READ}, indent=2) + "\n"
    with replace_file(directory / "acceptance.json") as partial:
        partial.write_text(text, encoding="utf-8")
    with replace_file(directory / "acceptance.png") as partial:
        draw_acceptance(report, partial)


def load_report(path: Path) -> AcceptanceReport:
    """Read what ``write_report`` wrote to the JSON file ``path``.

    Raises: ArtifactError where there is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        entries = [
            entry | {"acceptance_rate_at": tuple(entry["acceptance_rate_at"])} for entry in document["acceptances"]
        ]
        acceptances = tuple(Acceptance(**entry) for entry in entries)
        return AcceptanceReport(document["machine"], document["settings"], acceptances)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(path, "is a report of acceptance", repr(error), "measure it again") from error


def draw_acceptance(report: AcceptanceReport, path: Path) -> None:
    """Draw the rates by depth, a panel for each held-out set and a line for each draft."""
    sets = list(dict.fromkeys(entry.held_out for entry in report.acceptances))
    figure = import_matplotlib().Figure(figsize=(4.8 * len(sets), 3.9), layout="constrained")
    panels = figure.subplots(1, len(sets), sharey=True, squeeze=False)[0]
    drafts = list(dict.fromkeys(entry.draft for entry in report.acceptances))
    for panel, held_out in zip(panels, sets, strict=True):
        entries = [entry for entry in report.acceptances if entry.held_out == held_out]
        for entry in entries:
            depths = range(1, len(entry.acceptance_rate_at) + 1)
            label = f"{entry.draft}: {entry.acceptance_length:.2f}"
            style = {"marker": "o", "linewidth": 1.5, "markersize": 4, "color": f"C{drafts.index(entry.draft)}"}
            panel.plot(depths, entry.acceptance_rate_at, label=label, **style)
        panel.set_title(f"{held_out}, {entries[0].num_prompts} prompts", loc="left", fontsize=10)
        panel.set_xlabel("depth of the draft token")
        panel.set_xticks(list(depths))
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(title="acceptance_length", fontsize=8, title_fontsize=8, frameon=False)
    panels[0].set_ylabel("acceptance_rate_at[depth]")
    figure.savefig(path, dpi=150)

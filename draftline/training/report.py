"""What a training leaves to look at: ``log.jsonl``, plots of loss and acceptance, a table."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftline.checkpoints.optional_package import import_optional
from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

LOG_FILE = "log.jsonl"
MOST_POINTS = 200  # of a curve: what is more is averaged


class Log:
    """One JSON object a line: a step, or a validation. Only the main process writes."""

    def __init__(self, path: Path, *, is_written: bool) -> None:
        self._path, self._is_written = path, is_written

    def cut(self, num_bytes: int) -> None:
        """Forget what was written behind ``num_bytes``, which a killed run did after its last checkpoint.

        Raises: ArtifactError where the log is shorter.
        """
        if not self._is_written:
            return
        with self._path.open("ab") as file:
            length = file.tell()
            if length < num_bytes:
                rule, cure = (
                    f"the log has the {num_bytes} bytes of its checkpoint",
                    "move the folder away to start anew",
                )
                raise ArtifactError(self._path, rule, f"{length} bytes", cure)
            file.truncate(num_bytes)

    def write(self, entry: Mapping[str, object]) -> None:
        if self._is_written:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def sync(self) -> int:
        """Bring the log to the disk; return its length in bytes."""
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()


def load_log(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the steps and the validations of a log."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [entry for entry in entries if not entry.get("is_validation")]
    return steps, [entry for entry in entries if entry.get("is_validation")]


def write_plots(directory: Path) -> list[Path]:
    """Draw ``loss.png`` and ``acceptance.png`` of the log in ``directory``; return their paths.

    Raises: MissingPackageError without matplotlib.
    """
    steps, validations = load_log(directory / LOG_FILE)
    return [_draw_loss(directory / "loss.png", steps, validations), _draw_acceptance(directory, steps, validations)]


def write_table(directory: Path) -> str:
    """Return the validations as text, ten of them at most, the last one included."""
    _, validations = load_log(directory / LOG_FILE)
    stride = -(-len(validations) // 10)
    shown = validations[::-1][::stride][::-1]
    lines = ["     tokens  minutes     loss  accepted by depth"]
    for entry in shown:
        rates = " ".join(f"{rate:.3f}" for rate in entry["acceptance"])
        lines.append(f"{entry['tokens']:>11}  {entry['seconds'] / 60:>7.1f}  {entry['loss']:>7.4f}  {rates}")
    return "\n".join(lines)


def import_matplotlib() -> Any:
    """Return ``matplotlib.figure``, or raise MissingPackageError."""
    return import_optional("matplotlib.figure", "the plot of a training", "pip install 'draftline[train]'")


def _draw_loss(path: Path, steps: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> Path:
    figure = import_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*_averaged(steps, lambda entry: entry["loss"]), color="C0", alpha=0.6, label="training")
    tokens, losses = [entry["tokens"] for entry in validations], [entry["loss"] for entry in validations]
    axes.plot(tokens, losses, color="C1", marker=".", label="held back")
    _finish(figure, axes, path, "loss per position")
    return path


def _draw_acceptance(
    directory: Path, steps: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]
) -> Path:
    figure = import_matplotlib().Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    num_depths = max((len(entry["acceptance"]) for entry in validations), default=0)
    for depth in range(num_depths):
        axes.plot(*_averaged(steps, _acceptance_at(depth)), color=f"C{depth}", alpha=0.3)
        having = [entry for entry in validations if len(entry["acceptance"]) > depth]
        tokens, rates = [entry["tokens"] for entry in having], [entry["acceptance"][depth] for entry in having]
        axes.plot(tokens, rates, color=f"C{depth}", marker=".", label=f"depth {depth + 1}, held back")
    axes.set_ylim(0, 1)
    _finish(figure, axes, directory / "acceptance.png", "acceptance_rate_at[depth], estimated")
    return directory / "acceptance.png"


def _acceptance_at(depth: int) -> Any:
    return lambda entry: entry["acceptance"][depth] if len(entry["acceptance"]) > depth else float("nan")


def _averaged(steps: Sequence[Mapping[str, Any]], value: Any) -> tuple[list[float], list[float]]:
    """Return tokens and values, each the mean of as many steps as leave ``MOST_POINTS``."""
    stride = max(1, -(-len(steps) // MOST_POINTS))
    groups = [steps[first : first + stride] for first in range(0, len(steps), stride)]
    tokens = [sum(entry["tokens"] for entry in group) / len(group) for group in groups]
    return tokens, [sum(map(value, group)) / len(group) for group in groups]


def _finish(figure: Any, axes: Any, path: Path, label: str) -> None:
    axes.set_xlabel("tokens of training")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend()
    with replace_file(path) as partial:
        figure.savefig(partial, dpi=150)

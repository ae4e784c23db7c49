"""Draw several trainings beside each other."""

from __future__ import annotations

from pathlib import Path

from draftline.training.report import import_matplotlib
from draftline.training.results import FURTHER, Results, fit_trend
from draftline.whole_file import replace_file


def draw_results(results: Results, path: Path) -> None:
    """Draw acceptance lengths over tokens of training, and the rates by depth at their ends.

    Raises: MissingPackageError without matplotlib.
    """
    figure = import_matplotlib().Figure(figsize=(10, 4.2), layout="constrained")
    lengths, rates = figure.subplots(1, 2)
    for number, training in enumerate(results.trainings):
        color, curve = f"C{number}", [point for point in training.curve if point.tokens > 0]
        tokens = [point.tokens for point in curve]
        lengths.plot(
            tokens, [point.acceptance_length for point in curve], color=color, marker=".", label=training.draft
        )
        if (trend := fit_trend(training.curve)) is not None:
            ends = [trend.first_tokens, FURTHER * training.curve[-1].tokens]
            lengths.plot(ends, [trend.at(end) for end in ends], color=color, linestyle=":", linewidth=1)
        last = training.curve[-1].acceptance
        rates.plot(range(1, len(last) + 1), last, color=color, marker=".", label=training.draft)
    lengths.set_xscale("log")
    lengths.set_xlabel(f"tokens of training; dotted: the trend, up to {FURTHER} times as many")
    lengths.set_ylabel("acceptance_length, held-back answers")
    rates.set_xlabel("depth of the draft token, at the end of training")
    rates.set_ylabel("acceptance_rate_at[depth], held-back answers")
    rates.set_ylim(0, 1)
    for axes in (lengths, rates):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    rates.set_xticks(range(1, 1 + max(len(training.curve[-1].acceptance) for training in results.trainings)))
    with replace_file(path) as partial:
        figure.savefig(partial, dpi=150)

"""``python -m draftline.training.page [DIR]``: publish what ``scripts/train_drafts`` trained and measured.

Its files become ``docs/bench/training.json`` and ``training.png``, and its numbers go into the pages that show them.

A page shows them between the lines ``<!-- training.json: NAME -->`` and ``<!-- end -->``, NAME one of ``BLOCKS``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftline.bench.pages import fill_blocks, write_markdown_table
from draftline.errors import DraftlineError
from draftline.training.acceptance_report import Acceptance
from draftline.training.results import FURTHER, Results, fit_trend, load_results

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ROOT / "docs" / "bench" / "training.json"
PAGES = (ROOT / "docs" / "training.md", ROOT / "README.md")
NOT_MEASURED = "*Not measured yet.*"

VERSIONS = ("draftline", "torch", "onnxruntime")
SET_NAMES = {"mt-bench": "MT-bench", "human-eval": "HumanEval"}


def fill_page(page: str, results: Results | None) -> str:
    """Return ``page`` with the blocks that ``results`` give; None: nothing was measured.

    Raises: DraftlineError for a block of an unknown name.
    """
    return fill_blocks(page, NUMBERS.name, results, BLOCKS, NOT_MEASURED)


def _run(results: Results) -> list[str]:
    """On what all of it was trained and measured."""
    if not results.trainings:
        return []
    provenance, settings = (
        max((one.provenance for one in results.trainings), key=_num_answers),
        results.acceptance.settings,
    )
    machine, data = provenance["machine"], provenance["data"]
    flags = " ".join(name for name, present in machine["flags"].items() if present)
    packages = {"draftline": provenance["draftline_version"], **machine["versions"]}
    versions = ", ".join(f"{name} {version}" for name, version in packages.items() if name in VERSIONS)
    asked = [f"{entries[0].num_prompts} of {SET_NAMES[name]}" for name, entries in _sets(results).items()]
    return [
        f"- {machine['processor']}, {machine['num_cores']} cores; flags: {flags}; {versions}",
        f"- trained on {_count(data['num_sequences'])} answers or the first of them, {_count(data['num_tokens'])} "
        f"tokens with prompts, {_count(data['num_answer_tokens'])} of them drawn by the target at temperature "
        f"{data['temperature']:g}, {data['max_tokens']} an answer at most; prompts: {', '.join(data['prompts'])}",
        f"- measured on held-out prompts, {' and '.join(asked)}; greedy, {settings['weights_dtype']}, "
        f"answers of {settings['max_tokens']} tokens at most, chains of {settings['max_depth']}",
        "- [all numbers](bench/training.json), [plot](bench/training.png)",
    ]


def _trainings(results: Results) -> list[str]:
    rows = []
    for training in results.trainings:
        course, settings = training.provenance["training"], training.provenance["settings"]
        tokens, seconds = course["tokens"], course["seconds"]
        coverage = course.get("draft_vocab_coverage")
        vocabulary = "all" if coverage is None else f"{_count(settings['draft_vocab_size'])} ({100 * coverage:.1f} %)"
        rows.append(
            [
                f"`{training.draft}`",
                f"{training.num_bytes / 1e6:.1f} MB",
                vocabulary,
                _count(_num_answers(training.provenance)),
                f"{_count(tokens)} ({tokens / training.provenance['data']['num_tokens']:.1f} passes)",
                f"{seconds / 60:.1f}",
                f"{tokens / max(seconds, 1e-9):.0f}",
                f"{training.curve[-1].acceptance_length:.2f}",
            ]
        )
    title = [
        "draft",
        "weights",
        "draft vocabulary",
        "tokens of answers",
        "tokens trained",
        "minutes",
        "tokens/s",
        "held back",
    ]
    return write_markdown_table(title, rows) if rows else []


def _acceptance(results: Results) -> list[str]:
    lines: list[str] = []
    for name, entries in _sets(results).items():
        depths = [f"{depth}" for depth in range(1, len(entries[0].acceptance_rate_at) + 1)]
        rows = [
            [
                f"`{entry.draft}`",
                f"**{entry.acceptance_length:.2f}**",
                *_rates(entry.acceptance_rate_at),
                f"{entry.drafted_per_step:.1f}",
            ]
            for entry in entries
        ]
        title = [SET_NAMES[name], "`acceptance_length`", *depths, "drafted a step"]
        lines += [*write_markdown_table(title, rows), ""]
    return lines[:-1]


def _ablation(results: Results) -> list[str]:
    """EAGLE-3 drafts that differ in ``ttt_steps``: of the drafts right up to a depth, the share right at the next."""
    trainings = [training for training in results.trainings if training.provenance["method"] == "eagle3"]
    rows = []
    for name in _sets(results):
        for training in trainings:
            (entry,) = [entry for entry in results.acceptances_of(training.draft) if entry.held_out == name]
            steps = f"{training.provenance['settings']['ttt_steps']}"
            minutes = f"{training.provenance['training']['seconds'] / 60:.0f}"
            length = f"{entry.acceptance_length:.2f}"
            rows.append([SET_NAMES[name], steps, minutes, *_rates(_conditional(entry)), length])
    if len(trainings) < 2:
        return []
    depths = [f"{depth}" for depth in range(1, len(_conditional(results.acceptance.acceptances[0])) + 1)]
    return write_markdown_table(["", "`ttt_steps`", "minutes", *depths, "`acceptance_length`"], rows)


def _more(results: Results) -> list[str]:
    """The curves, and what their trends say of more tokens."""
    rows = []
    for training in results.trainings:
        trend, last = fit_trend(training.curve), training.curve[-1]
        if trend is None:
            continue
        rows.append(
            [
                f"`{training.draft}`",
                f"{last.acceptance_length:.2f} after {_count(last.tokens)}",
                f"{trend.num_points} from {_count(trend.first_tokens)} tokens on",
                f"{trend.per_tenfold:+.2f}",
                f"{trend.largest_error:.3f}",
                f"{trend.at(FURTHER * last.tokens):.2f}",
            ]
        )
    if not rows:
        return []
    title = ["draft", "held back", "fitted to validations", "each tenfold", "largest error", f"at {FURTHER} times"]
    plot = "![acceptance_length over tokens of training, and acceptance by depth](bench/training.png)"
    return [plot, "", *write_markdown_table(title, rows)]


def _summary(results: Results) -> list[str]:
    sets = _sets(results)
    drafts = list(dict.fromkeys(entry.draft for entries in sets.values() for entry in entries))
    rows = [
        [f"`{draft}`", *(f"{entry.acceptance_length:.2f}" for entry in results.acceptances_of(draft))]
        for draft in drafts
    ]
    return write_markdown_table(["`acceptance_length`", *(SET_NAMES[name] for name in sets)], rows) if rows else []


BLOCKS: dict[str, Callable[[Results], list[str]]] = {
    "run": _run,
    "trainings": _trainings,
    "acceptance": _acceptance,
    "ablation": _ablation,
    "more": _more,
    "summary": _summary,
}


def _sets(results: Results) -> dict[str, list[Acceptance]]:
    """Held-out set -> what was measured on it."""
    found: dict[str, list[Acceptance]] = {}
    for entry in results.acceptance.acceptances:
        found.setdefault(entry.held_out, []).append(entry)
    return found


def _conditional(entry: Acceptance) -> list[float]:
    before = [1.0, *entry.acceptance_rate_at[:-1]]
    return [rate / there if there else 0.0 for there, rate in zip(before, entry.acceptance_rate_at, strict=True)]


def _rates(rates: Sequence[float]) -> list[str]:
    return [f"{rate:.2f}" for rate in rates]


def _num_answers(provenance: Mapping[str, Any]) -> int:
    """Return how many tokens of answers a draft was trained on."""
    number: int = provenance["data"]["num_answer_tokens"]
    return number


def _count(number: int) -> str:
    return f"{number:,}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish a run, or fill the pages anew; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="page", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="DIR", help="copy a run of scripts/train_drafts first")
    run: Path | None = parser.parse_args(arguments).run
    try:
        results = load_results(NUMBERS if run is None else run / NUMBERS.name)
        filled = {page: fill_page(page.read_text(encoding="utf-8"), results) for page in PAGES}
    except DraftlineError as error:
        print(f"page: {error}", file=sys.stderr)
        return 2
    if run is not None:
        for suffix in (".json", ".png"):
            shutil.copyfile((run / NUMBERS.name).with_suffix(suffix), NUMBERS.with_suffix(suffix))
    for page, text in filled.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m draftline.training.collect DIR BUILD=DRAFT...``: several trainings and their acceptance in one file.

Reads what ``draftline train`` left in each build and draft, and ``DIR/acceptance.json``, in which drafts have the names
of their builds; writes ``DIR/training.json`` and ``DIR/training.png``, which ``draftline.training.page`` publishes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftline.errors import ArtifactError, DraftlineError
from draftline.training.acceptance_report import AcceptanceReport, load_report
from draftline.training.report import LOG_FILE, load_log
from draftline.training.results import Results, Training, as_point
from draftline.training.results_plot import draw_results
from draftline.training.steps import PROVENANCE_FILE


def load_training(build: Path, draft: Path) -> Training:
    """Read what ``draftline train`` left in a build directory and the folder of its draft.

    Raises: ArtifactError where they are absent, or of different trainings.
    """
    log = build / "train" / LOG_FILE
    try:
        provenance = json.loads((draft / PROVENANCE_FILE).read_text(encoding="utf-8"))
        _, validations = load_log(log)
        last = provenance["training"]["held_back"]
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(draft, f"was trained in {build}", repr(error), "run `draftline train` first") from error
    if validations[-1:] != [last]:
        rule, got = f"its {PROVENANCE_FILE} ends as {log} does", f"{last['tokens']} tokens of training"
        raise ArtifactError(draft, rule, got, "run `draftline train` to its end, and name the draft that it wrote")
    curve = tuple(as_point(entry) for entry in validations)
    num_bytes = sum(path.stat().st_size for path in draft.glob("*.safetensors"))
    return Training(build.resolve().name, provenance, num_bytes, curve)


def join_results(acceptance: AcceptanceReport, trainings: Sequence[Training]) -> Results:
    """Join both.

    Raises: DraftlineError unless each training's draft was measured, and was trained on answers of the same kind, more
    or fewer, as the others.
    """
    results = Results(acceptance, tuple(trainings))
    for training in trainings:
        if not results.acceptances_of(training.draft):
            raise DraftlineError(training.draft, "its acceptance was measured", "no such draft", "measure its build")
        first, kind = trainings[0], _kind_of_answers(training)
        if kind != _kind_of_answers(first):
            rule, cure = f"was trained on answers as {first.draft} was", "train both with the same train.data"
            raise DraftlineError(training.draft, rule, f"other answers: {kind}", cure)
    return results


def _kind_of_answers(training: Training) -> dict[str, Any]:
    """Return what a draft's data are but for how many."""
    counted = {"sha256", "num_sequences", "num_tokens", "num_answer_tokens"}
    return {name: value for name, value in training.provenance["data"].items() if name not in counted}


def write_results(results: Results, directory: Path) -> None:
    """Write ``training.json`` and ``training.png``."""
    text = json.dumps(asdict(results), indent=2) + "\n"
    (directory / "training.json").write_text(text, encoding="utf-8")
    draw_results(results, directory / "training.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="collect", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="holds acceptance.json")
    parser.add_argument("trained", nargs="+", metavar="BUILD=DRAFT", help="a build directory, and the draft's folder")
    options = parser.parse_args(arguments)
    try:
        pairs = [pair.partition("=") for pair in options.trained]
        trainings = [load_training(Path(build), Path(draft)) for build, _, draft in pairs]
        results = join_results(load_report(options.directory / "acceptance.json"), trainings)
        write_results(results, options.directory)
    except DraftlineError as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2
    print(f"python -m draftline.training.page {options.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m draftline.bench.gpu.page [DIR]``: publish a run of ``scripts/gpu_check``.

Its JSON becomes ``docs/bench/gpu.json``, and ``docs/gpu.md`` shows it between the lines ``<!-- gpu.json: run -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from draftline.bench.gpu.report import JSON_FILE, CheckReport, load_check, write_page
from draftline.bench.pages import fill_blocks
from draftline.errors import DraftlineError

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = ROOT / "docs" / "bench" / "gpu.json"
PAGE = ROOT / "docs" / "gpu.md"
NOT_RUN = "**No GPU was available. Nothing was run: there is no result, and no time was measured.**"


def fill_page(page: str, report: CheckReport | None) -> str:
    """Return ``page`` with the run in its place; None: there was none.

    >>> print(fill_page("<!-- gpu.json: run -->\\nold\\n<!-- end -->", None))
    <!-- gpu.json: run -->
    <BLANKLINE>
    **No GPU was available. Nothing was run: there is no result, and no time was measured.**
    <BLANKLINE>
    <!-- end -->
    """
    return fill_blocks(page, NUMBERS.name, report, {"run": _lines}, NOT_RUN)


def _lines(report: CheckReport) -> list[str]:
    """The page's lines, its parts a level below the page's own."""
    return [f"#{line}" if line.startswith("## ") else line for line in write_page(report)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftline.bench.gpu.page", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", metavar="DIR", help="of scripts/gpu_check; without, as published")
    options = parser.parse_args(arguments)
    try:
        if options.run is not None:
            load_check(options.run / JSON_FILE)
            shutil.copyfile(options.run / JSON_FILE, NUMBERS)
        report = load_check(NUMBERS) if NUMBERS.exists() else None
        PAGE.write_text(fill_page(PAGE.read_text(encoding="utf-8"), report), encoding="utf-8")
    except DraftlineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pages that show measured numbers, in blocks that a program fills.

A block stands between the lines ``<!-- NUMBERS.json: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from draftline.errors import DraftlineError

Run = TypeVar("Run")


def fill_blocks(
    page: str, numbers: str, run: Run | None, blocks: Mapping[str, Callable[[Run], list[str]]], not_measured: str
) -> str:
    """Return ``page`` with the lines that ``blocks`` make of ``run`` where the file ``numbers`` is named.

    ``not_measured`` stands where there is no run, or a block has nothing to say of it.

    Raises: DraftlineError for a block of an unknown name.

    >>> page = "<!-- speed.json: fastest -->\\nold\\n<!-- end -->"
    >>> print(fill_blocks(page, "speed.json", [3, 5], {"fastest": lambda run: [str(max(run))]}, "Unknown."))
    <!-- speed.json: fastest -->
    <BLANKLINE>
    5
    <BLANKLINE>
    <!-- end -->
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in blocks:
            raise DraftlineError("page", f"blocks are some of {', '.join(blocks)}", name, "name one of them")
        lines = [] if run is None else blocks[name](run)
        return "\n".join([match[1], *(lines or [not_measured]), "", match[3]])

    pattern = rf"(^<!-- {re.escape(numbers)}: (\w+) -->\n).*?(^<!-- end -->$)"
    return re.sub(pattern, fill, page, flags=re.DOTALL | re.MULTILINE)


def write_markdown_table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table.

    >>> write_markdown_table(["", "length"], [["eagle3", "2.5"]])
    ['| | length |', '| --- | --- |', '| eagle3 | 2.5 |']
    """
    lines = (title, ["---"] * len(title), *rows)
    return ["".join(f"| {cell} " if cell else "| " for cell in cells) + "|" for cells in lines]

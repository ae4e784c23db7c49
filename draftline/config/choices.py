"""The static trees that a pipeline file may name, and how large a static tree is."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, TypeGuard, get_args

ChoicesName = Literal[
    "mc_sim_7b_63",
    "vicuna_7b_stage1",
    "vicuna_7b_stage1_ablation",
    "vicuna_7b_stage2",
    "vicuna_13b_stage1",
    "vicuna_13b_stage2",
    "vicuna_33b_stage1",
    "vicuna_33b_stage2",
    "zephyr_stage2",
    "eagle_26",
]


@dataclass(frozen=True)
class TreeSize:
    """``max_nodes`` counts the root; ``top_k`` candidates of a node are needed for the widest rank."""

    max_nodes: int
    max_depth: int
    top_k: int

    def within(self, limits: TreeSize) -> bool:
        """Return whether nothing of it is more than ``limits``."""
        used_and_limits = zip(astuple(self), astuple(limits), strict=True)
        return all(used <= limit for used, limit in used_and_limits)


LARGEST = TreeSize(1024, 64, 64)

NAMED_SIZES: dict[str, TreeSize] = {
    **{name: TreeSize(64, 4, 10) for name in get_args(ChoicesName)},
    "vicuna_33b_stage1": TreeSize(64, 3, 10),
    "eagle_26": TreeSize(26, 5, 4),
}
"""The sizes of ``draftline.choices.NAMED_CHOICES``, whose paths are a floor above."""


def choices_size(choices: object) -> TreeSize | None:
    """Return the size of a named tree or a list of paths; None where ``choices`` is neither or beyond ``LARGEST``.

    >>> choices_size([[0], [1], [0, 0]])
    TreeSize(max_nodes=4, max_depth=2, top_k=2)
    """
    if isinstance(choices, str):
        return NAMED_SIZES.get(choices)
    if not _are_paths(choices):
        return None
    size = TreeSize(len(choices) + 1, max(map(len, choices)), max(map(max, choices)) + 1)
    return size if size.within(LARGEST) else None


def show_wrong_choices(choices: Sequence[object]) -> str:
    """Show the first entry that is no path within ``LARGEST``; where all are, or there is none, how many there are.

    >>> show_wrong_choices([[0], [-1], [0, 0]])
    '[-1]'
    """
    wrong = [path for path in choices if choices_size([path]) is None]
    return reprlib.repr(wrong[0]) if wrong else f"{len(choices)} paths"  # of any size


def orphans(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the paths that stand twice, or whose parent is not in the list.

    >>> orphans([[0], [1, 0], [0]])
    [(1, 0), (0,)]
    """
    paths = [tuple(path) for path in choices]
    present = {(), *paths}
    return [path for place, path in enumerate(paths) if path[:-1] not in present or path in paths[:place]]


def _are_paths(choices: object) -> TypeGuard[Sequence[Sequence[int]]]:
    return _is_list(choices) and all(_is_list(path) and all(map(_is_rank, path)) for path in choices)


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, (list, tuple)) and len(value) > 0

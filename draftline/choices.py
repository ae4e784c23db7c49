"""Static trees: the published ones by name, and the tree that a list of choices makes.

A choice is a path from the root that says which candidate (0 = most probable) it takes at each depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.errors import PipelineError


@dataclass(frozen=True)
class StaticTree:
    """The nodes of a list of choices, the root (node 0) included, ordered by depth, then by path.

    Shapes: all ``[N] int32``. ``parents`` as in ``draftline.tree``; ``ranks``: which candidate of its parent a node
    takes, the root's being -1; ``depths``: the root's being 0.
    """

    parents: NDArray[np.int32]
    ranks: NDArray[np.int32]
    depths: NDArray[np.int32]


def check_choices(choices: Sequence[Sequence[int]], where: str) -> None:
    """Check that choices make a tree.

    Raises: PipelineError, naming every problem, unless there are choices, every one has at least one rank, no rank is
    negative, none occurs twice, and the parent of each is a choice too.
    """
    paths = [tuple(choice) for choice in choices]
    known = {(), *paths}
    problems = [] if paths else ["no choice"]
    for path, count in Counter(paths).items():
        if count > 1:
            problems.append(f"{list(path)} {count} times")
        if not path:
            problems.append("a path of no rank")
        elif min(path) < 0:
            problems.append(f"{list(path)} with a negative rank")
        elif path[:-1] not in known:
            problems.append(f"{list(path)} without {list(path[:-1])}")
    if problems:
        raise PipelineError(
            where,
            "choices are different paths of ranks >= 0, and the parent of each is one of them",
            ", ".join(problems),
            "correct these paths, or take a named tree",
        )


def build_static_tree(choices: Sequence[Sequence[int]]) -> StaticTree:
    """Build the tree of choices that ``check_choices`` accepts.

    >>> tree = build_static_tree([(1,), (0, 0), (0,)])
    >>> tree.parents.tolist(), tree.ranks.tolist(), tree.depths.tolist()
    ([-1, 0, 0, 1], [-1, 0, 1, 0], [0, 1, 1, 2])
    """
    paths = sorted({(), *(tuple(choice) for choice in choices)}, key=lambda path: (len(path), path))
    node_of = {path: node for node, path in enumerate(paths)}
    return StaticTree(
        parents=np.array([-1, *(node_of[path[:-1]] for path in paths[1:])], dtype=np.int32),
        ranks=np.array([-1, *(path[-1] for path in paths[1:])], dtype=np.int32),
        depths=np.array([len(path) for path in paths], dtype=np.int32),
    )


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, path)) for path in text.split())


# One digit is one rank. Most useful first, as published.
# Source: medusa/model/medusa_choices.py of FasterDecoding/Medusa at e2a5d20 (Apache-2.0); ``eagle_26`` is
# ``mc_sim_7b_63`` of eagle/model/choices.py of SafeAILab/EAGLE at cb7e084 (Apache-2.0), EAGLE-1's tree.
NAMED_CHOICES: dict[str, tuple[tuple[int, ...], ...]] = {
    "mc_sim_7b_63": _paths(
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
        "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    "vicuna_7b_stage2": _paths(
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 030 "
        "0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 0020 "
        "70 14"
    ),
    "vicuna_7b_stage1_ablation": _paths(
        "0 00 1 000 01 10 2 02 001 3 03 010 20 002 04 4 0000 100 11 003 020 05 5 30 011 06 6 004 12 0001 40 005 07 "
        "08 030 0010 101 7 200 006 21 012 50 021 09 0002 040 8 13 007 0100 110 60 9 008 009 050 0020 102 013 0003 "
        "300 31"
    ),
    "vicuna_7b_stage1": _paths(
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 "
        "011 004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
    "vicuna_13b_stage2": _paths(
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 0010 "
        "030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 102 "
        "0011 300 1000"
    ),
    "vicuna_13b_stage1": _paths(
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 13 "
        "011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16"
    ),
    "vicuna_33b_stage2": _paths(
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 "
        "005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 "
        "22"
    ),
    "vicuna_33b_stage1": _paths(
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 "
        "60 020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021"
    ),
    "zephyr_stage2": _paths(
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 "
        "004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23"
    ),
    "eagle_26": _paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"),
}

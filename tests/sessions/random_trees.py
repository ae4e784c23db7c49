"""Random trees of drafts, and the paths in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def random_tree(random: np.random.Generator, num_nodes: int) -> list[int]:
    """Return the parents of a tree of ``num_nodes`` nodes, each hanging on one of the six before it."""
    return [-1, *(int(random.integers(max(0, node - 6), node)) for node in range(1, num_nodes))]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to ``node``, both included."""
    return ([] if parents[node] < 0 else path_to(parents, parents[node])) + [node]

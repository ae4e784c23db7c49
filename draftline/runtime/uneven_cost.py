"""What a forward costs beyond its number of rows, where its sequences differ in theirs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.runtime.isotonic import fit_isotonic

_NUM_CLASSES = 12  # trees of up to 2 ** 11 nodes
_PRIOR_STEPS = 1.0  # for each class, as if so many steps had cost nothing beyond the curve
_MAX_STEPS = 16.0  # older ones are forgotten


class UnevenCost:
    """Milliseconds beyond the cost curve, by the number of sequences and the nodes of the largest tree (powers of two).

    One tree of eleven nodes among fifteen roots costs the function body of TreeAttention as much as 32 rows, two of
    each: it pads sequences to the longest, or runs them apart and reads the weights twice. Native kernels charge next
    to nothing for it. What was hardly seen costs nothing: it is tried, and found out.
    """

    def __init__(self) -> None:
        self._steps: dict[int, NDArray[np.float64]] = {}  # by class of the number of sequences, then of the tree
        self._beyond: dict[int, NDArray[np.float64]] = {}
        self._fitted: dict[int, NDArray[np.float64]] = {}

    def observe(self, num_sequences: int, largest_tree: int, beyond_ms: float) -> None:
        """Learn that a step took so much more than the curve says; ``largest_tree`` counts the root."""
        if num_sequences == 1 or largest_tree == 1:
            return  # the curve was measured with one sequence, and knows it
        key, size = num_sequences.bit_length(), (largest_tree - 1).bit_length()
        steps = self._steps.setdefault(key, np.full(_NUM_CLASSES, _PRIOR_STEPS))
        beyond = self._beyond.setdefault(key, np.zeros(_NUM_CLASSES))
        steps[size] = min(steps[size] + 1.0, _MAX_STEPS)
        beyond[size] += (beyond_ms - beyond[size]) / steps[size]
        # Classes that were never seen follow their neighbours.
        self._fitted[key] = np.maximum(fit_isotonic(beyond, steps - _PRIOR_STEPS + 1e-3), 0.0)

    def at(self, num_sequences: int, largest_trees: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the milliseconds beyond the curve, 0 or more, where largest trees have so many nodes: any shape."""
        fitted = self._fitted.get(num_sequences.bit_length())
        if fitted is None or num_sequences == 1:
            return np.zeros(largest_trees.shape)
        sizes = np.ceil(np.log2(np.maximum(largest_trees, 1))).astype(np.int64)
        beyond: NDArray[np.float64] = np.where(sizes > 0, fitted[np.minimum(sizes, _NUM_CLASSES - 1)], 0.0)
        return beyond

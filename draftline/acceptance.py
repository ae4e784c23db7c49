"""Which drafted tokens become text: exact acceptance, and Medusa's typical acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, node_depths
from draftline.speculation import Acceptance

_IMPOSSIBLE = np.float32(-1e20)  # stands for lower logits, -inf too: no weight, but finite times 0


@dataclass(frozen=True)
class Accepted:
    """What one step accepted.

    Shapes: ``paths [B, A + 1] int64``: accepted nodes from the root (node 0) down, padded with -1, where A is the
    largest of ``num_accepted_tokens [B] int64`` (the root and the bonus token not counted); ``bonus_ids [B] int32``:
    the target's own token after the last accepted node.
    """

    paths: NDArray[np.int64]
    num_accepted_tokens: NDArray[np.int64]
    bonus_ids: NDArray[np.int32]


def accept_exact(trees: DraftTrees, sampled_ids: NDArray[np.int32]) -> Accepted:
    """Walk from every root while a child is the token that the target drew.

    The target draws one token per position, whatever the tree; so the text is the one it would have written alone.

    Shapes: ``sampled_ids [B, N]``: what the target drew after each node; ignored in padding.

    >>> from draftline.draft_trees import chain_trees
    >>> trees = chain_trees(np.int32([9]), np.int32([[5, 6, 7]]), np.zeros((1, 3), np.float32), np.array([3]), 0)
    >>> accepted = accept_exact(trees, np.int32([[5, 6, 8, 0]]))
    >>> accepted.paths.tolist(), accepted.num_accepted_tokens.tolist(), accepted.bonus_ids.tolist()
    ([[0, 1, 2]], [2], [8])
    """
    num_sequences, width = trees.parents.shape
    nodes = np.flatnonzero(_drawn(trees, sampled_ids))
    ends = list(range(0, num_sequences * width, width))
    paths: list[list[int]] = [[0] for _ in ends]
    # Parents precede children, and siblings differ: the target drew at most one child of a path's end.
    for node, parent in zip(nodes.tolist(), trees.flat_parents[nodes].tolist(), strict=True):
        sequence = node // width
        if parent == ends[sequence]:
            ends[sequence] = node
            paths[sequence].append(node - sequence * width)
    lengths = [len(path) for path in paths]
    longest = max(lengths, default=1)
    padded = [path + [-1] * (longest - len(path)) for path in paths]
    return Accepted(
        paths=np.array(padded, dtype=np.int64).reshape(num_sequences, longest),
        num_accepted_tokens=np.array(lengths, dtype=np.int64) - 1,
        bonus_ids=sampled_ids.ravel()[np.array(ends, dtype=np.int64)],
    )


def accept_typical(trees: DraftTrees, sampled_ids: NDArray[np.int32], is_acceptable: NDArray[np.bool_]) -> Accepted:
    """Take the longest path of acceptable nodes, the one whose end comes first among equals. Lossy.

    Source: Medusa (Cai et al., 2024), section 2.3.1. Its code prefers the most probable of the longest paths.

    Shapes: ``sampled_ids [B, N]`` as in ``accept_exact``; ``is_acceptable [B, N]`` as ``acceptable_nodes`` says;
    ignored at roots and in padding.
    """
    depths = node_depths(trees)
    reached = np.where(_reached(trees, is_acceptable & (trees.parents >= 0)), depths, -1)
    ends = reached.argmax(axis=1)
    sequences = np.arange(ends.size)
    num_accepted = reached[sequences, ends]
    paths = np.full((ends.size, int(num_accepted.max(initial=0)) + 1), -1, dtype=np.int64)
    for depth in range(paths.shape[1] - 1, -1, -1):
        here = num_accepted >= depth
        paths[here, depth] = ends[here]
        ends = np.where(here, trees.parents[sequences, ends], ends)
    last_ids = sampled_ids[sequences, paths[sequences, num_accepted]]
    return Accepted(paths, num_accepted, last_ids)


def acceptable_nodes(
    trees: DraftTrees,
    logits: NDArray[np.float32],
    sampled_ids: NDArray[np.int32],
    temperature: NDArray[np.float32],
    acceptance: Acceptance,
) -> NDArray[np.bool_]:
    """Find the nodes whose token is typical after their parent: ``[B, N] bool``, False at roots and in padding.

    Shapes: ``logits [R, V]``: of all nodes, sequence by sequence, edited as before sampling (a banned token is never
    typical); ``sampled_ids [B, N]``; ``temperature [B]``. In sequences of temperature 0 the acceptable token is the one
    that the target drew, as in ``accept_exact``.
    """
    acceptable = _drawn(trees, sampled_ids)
    drafted = (trees.parents >= 0) & (temperature > 0)[:, None]
    sequences, nodes = np.nonzero(drafted)
    first_rows = np.cumsum(trees.num_nodes) - trees.num_nodes
    rows, row_of = np.unique(first_rows[sequences] + trees.parents[sequences, nodes], return_inverse=True)
    row_temperature = np.repeat(temperature, trees.num_nodes)[rows]
    acceptable[drafted] = is_typical(
        logits[rows], row_temperature, row_of, trees.token_ids[sequences, nodes], acceptance
    )
    return acceptable


def is_typical(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    acceptance: Acceptance,
) -> NDArray[np.bool_]:
    """Test tokens against ``p(token) > min(epsilon, alpha * exp(-H(p)))``.

    Source: Medusa, section 2.3.1; the rule of Hewitt et al., 2022, for truncating by entropy. Top-k and top-p do not
    take part.

    Shapes: ``logits [R, V]`` (-inf = impossible) and ``temperature [R]`` > 0 give R distributions; ``rows`` and
    ``token_ids [C]`` the tokens -> ``[C] bool``.

    Numerics: float32, sums over V included: thresholds are right to about 1e-5 of themselves. In a row that holds no
    distribution (NaN, inf, or nothing above -inf) no token is typical.

    >>> logits = np.log(np.float32([[0.5, 0.46, 0.04]]))  # H = 0.83, so min(0.09, 0.3 * 0.43) = 0.09
    >>> is_typical(logits, np.float32([1]), np.array([0, 0]), np.int32([1, 2]), Acceptance("typical")).tolist()
    [True, False]
    """
    thresholds = np.empty(len(logits))
    probabilities = np.empty(len(rows))
    order = np.argsort(rows, kind="stable")
    ends = np.searchsorted(rows[order], np.arange(len(logits) + 1))
    # Row by row: what one row needs stays in the cache.
    for row in range(len(logits)):
        with np.errstate(invalid="ignore"):  # inf - inf, which makes all of the row NaN
            scaled = logits[row] - logits[row].max()
        np.maximum(scaled, _IMPOSSIBLE, out=scaled)
        scaled /= temperature[row]
        weights = np.exp(scaled)
        total = float(weights.sum())
        entropy = np.log(total) - float(weights.dot(scaled)) / total
        thresholds[row] = min(acceptance.epsilon, acceptance.alpha * np.exp(-entropy))
        tokens = order[ends[row] : ends[row + 1]]
        probabilities[tokens] = weights[token_ids[tokens]] / total
    typical: NDArray[np.bool_] = probabilities > thresholds[rows]
    return typical


def _drawn(trees: DraftTrees, sampled_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    # Whether a node is the token that the target drew after its parent.
    drawn: NDArray[np.bool_] = sampled_ids.ravel()[trees.flat_parents].reshape(trees.parents.shape) == trees.token_ids
    return np.logical_and(drawn, trees.parents >= 0, out=drawn)


def _reached(trees: DraftTrees, is_acceptable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    # Whether a node and all its ancestors are acceptable, which padding is not, and roots always are.
    reached = is_acceptable.ravel().copy()
    reached[:: trees.parents.shape[1]] = True
    for ancestors in trees.ancestors:
        reached &= reached[ancestors]
    return reached.reshape(trees.parents.shape)

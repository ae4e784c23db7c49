"""Which sequences are trained on, which are held back, and in which batches they come.

Everything follows from the seed and, for the order, the number of the epoch: a run that goes on after a kill needs to
know where it was, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BATCHES_SORTED_TOGETHER = 64  # sequences of so many batches are sorted by length: little padding, and still a mixture
FIRST_LABEL = 2  # a row knows its token and the next one; the first that a draft could predict is the one after


def split_sequences(
    names: Sequence[str],
    is_answer: NDArray[np.bool_],
    sequence_starts: NDArray[np.int64],
    validation_share: float,
    seed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of the sequences to train on, and of those held back, each in ascending order.

    ``names`` are those of the S sequences; what stands before ``#`` names the prompt. All answers to a prompt are held
    back, or none, and which does not follow from the other prompts: data that grew leave the split of the older ones
    as it was. Where that holds nothing back, of few prompts, one prompt is. Sequences in which a draft has nothing to
    predict are left out of both.

    Shapes: ``is_answer [N]``, ``sequence_starts [S + 1]``.

    >>> split_sequences(["a", "b", "a#2", "c"], np.ones(12, bool), np.array([0, 4, 7, 10, 12]), 0.5, seed=4)
    (array([1]), array([0, 2]))
    """
    num_answers = np.concatenate([[0], np.cumsum(is_answer, dtype=np.int64)])
    first_labels = np.minimum(sequence_starts[:-1] + FIRST_LABEL, sequence_starts[1:])
    is_useful = num_answers[sequence_starts[1:]] > num_answers[first_labels]
    draws = np.array([_draw(name.partition("#")[0], seed) for name in names])
    is_held_back = draws < validation_share
    if is_useful.any() and not (is_held_back & is_useful).any():
        is_held_back = draws == draws[is_useful].min()
    return np.flatnonzero(is_useful & ~is_held_back), np.flatnonzero(is_useful & is_held_back)


def _draw(name: str, seed: int) -> float:
    """Return a number in [0, 1) that follows from the name and the seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48


def make_batches(
    sequences: NDArray[np.int64], lengths: NDArray[np.int64], batch_tokens: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Return the batches of an epoch: every one of ``sequences`` once, those of similar length together.

    A batch has ``batch_tokens`` at most, padding included, or is one longer sequence. ``lengths`` are those of all
    sequences of the data, by number.

    >>> make_batches(np.arange(4), np.array([3, 9, 3, 5]), 6, seed=0, epoch=0)
    [array([1]), array([3]), array([2, 0])]
    """
    generator = np.random.default_rng([seed, epoch])
    shuffled = generator.permutation(sequences)
    ends = np.cumsum(lengths[shuffled])
    window = ends // max(1, BATCHES_SORTED_TOGETHER * batch_tokens)
    by_length = shuffled[np.lexsort((lengths[shuffled], window))]
    batches: list[NDArray[np.int64]] = []
    first = 0
    for place, longest in enumerate(lengths[by_length]):
        starts_window = place > first and longest < lengths[by_length[place - 1]]
        if place > first and (starts_window or longest * (place + 1 - first) > batch_tokens):
            batches.append(by_length[first:place])
            first = place
    if len(by_length):
        batches.append(by_length[first:])
    return [batches[index] for index in generator.permutation(len(batches))]

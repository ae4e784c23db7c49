"""Choose the vocabulary of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.errors import CheckpointError


@dataclass(frozen=True)
class DraftVocabulary:
    """``target_ids [draft_vocab_size] int64``, ascending; ``coverage``: share of the counted tokens that are inside."""

    target_ids: NDArray[np.int64]
    coverage: float


def choose_draft_vocabulary(
    token_ids: NDArray[np.integer],  # type: ignore[type-arg]
    is_answer: NDArray[np.bool_],
    vocab_size: int,
    draft_vocab_size: int,
    always: Sequence[int],
) -> DraftVocabulary:
    """Take the ``draft_vocab_size`` tokens that the target draws most often; of equals, those of lower ids.

    Source: EAGLE-3's reference code: the most frequent tokens of the training set that have a loss. ``always`` are
    inside whatever their frequency: those that end a text.

    Shapes: ``token_ids [N]``, ``is_answer [N]``.
    Raises: CheckpointError if no token is of an answer, an id is not below ``vocab_size``, or the size is impossible.

    >>> ids = np.array([7, 7, 3, 3, 5, 9])
    >>> choose_draft_vocabulary(ids, np.arange(6) > 0, 10, 3, always=[2])
    DraftVocabulary(target_ids=array([2, 3, 5]), coverage=0.6)
    """
    kept = np.unique(np.asarray(always, np.int64))
    if not len(kept) < draft_vocab_size <= vocab_size:
        rule = f"more than the {len(kept)} tokens that end a text and at most the target's {vocab_size}"
        raise CheckpointError("draft_vocab_size", rule, draft_vocab_size, "choose a size between")
    drawn = token_ids[is_answer]
    if not drawn.size:
        raise CheckpointError("training data", "some tokens are of answers", "none", "answer some prompts first")
    if int(drawn.min()) < 0 or int(drawn.max()) >= vocab_size:
        got = f"ids {int(drawn.min())} .. {int(drawn.max())}"
        cure = "make the data with this target"
        raise CheckpointError("training data", f"token ids are below the target's vocab_size {vocab_size}", got, cure)
    counts = np.bincount(drawn, minlength=vocab_size)
    rank = counts.copy()
    rank[kept] = counts.max() + 1
    chosen = np.sort(np.argsort(-rank, kind="stable")[:draft_vocab_size]).astype(np.int64)
    return DraftVocabulary(chosen, float(counts[chosen].sum() / counts.sum()))

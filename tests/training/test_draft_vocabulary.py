"""The draft's vocabulary holds the tokens that the target draws most often."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftline.errors import CheckpointError
from draftline.training.draft_vocabulary import choose_draft_vocabulary


@given(
    drawn=st.lists(st.tuples(st.integers(0, 19), st.booleans()), min_size=1, max_size=60),
    size=st.integers(3, 20),
    ends=st.sets(st.integers(0, 19), max_size=2),
)
def test_no_token_outside_is_more_frequent_than_one_inside(
    drawn: list[tuple[int, bool]], size: int, ends: set[int]
) -> None:
    drawn.append((0, True))
    ids, answers = (np.array(values) for values in zip(*drawn, strict=True))
    vocabulary = choose_draft_vocabulary(ids, answers, 20, size, sorted(ends))
    inside = vocabulary.target_ids.tolist()
    assert len(inside) == size
    assert inside == sorted(set(inside))
    assert ends <= set(inside)
    counts = Counter(ids[answers].tolist())
    best_outside = min(((-counts[token], token) for token in range(20) if token not in inside), default=(1, 0))
    assert all((-counts[token], token) < best_outside for token in inside if token not in ends)
    assert vocabulary.coverage == sum(counts[token] for token in inside) / counts.total()


@pytest.mark.parametrize(
    ("ids", "is_answer", "size", "message"),
    [
        ([1, 2], [False, False], 3, "training data: some tokens are of answers; got none"),
        ([1, 20], [True, True], 3, "training data: token ids are below the target's vocab_size 20; got ids 1 .. 20"),
        ([1, 2], [True, True], 21, "draft_vocab_size: more than the 1 tokens that end a text .* got 21"),
        ([1, 2], [True, True], 1, "draft_vocab_size: .* got 1"),
    ],
)
def test_what_makes_no_vocabulary_is_refused(ids: list[int], is_answer: list[bool], size: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose_draft_vocabulary(np.array(ids), np.array(is_answer), 20, size, [2])

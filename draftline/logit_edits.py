"""Changes to single logits before sampling: penalties, bias, bad words and minimum lengths, as sparse edits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

BANNED = -1.0e30  # far below any logit, and finite after a division by the smallest temperature


@dataclass(frozen=True)
class LogitEdits:
    """Changes to single logits before sampling, E of them; no (row, token) twice.

    ``edited = repeated(logit + bias) + offset``, where ``repeated(l)`` is ``l / divisor`` above 0 and ``l * divisor``
    otherwise (the repetition penalty). Neutral: bias 0, divisor 1, offset 0. ``offset`` ``BANNED`` bans a token. No
    edited logit is below ``BANNED``: tokens of a row in which all are banned are equal, so the greedy one is id 0 and
    the drawn one uniform over the vocabulary.

    Shapes: ``rows [E] int32``, indices into ``StepBatch.sample_rows``; ``token_ids [E] int32``; the others
    ``[E] float32``.
    """

    rows: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    bias: NDArray[np.float32]
    divisor: NDArray[np.float32]
    offset: NDArray[np.float32]


NO_EDITS = LogitEdits(
    rows=np.empty(0, np.int32),
    token_ids=np.empty(0, np.int32),
    bias=np.empty(0, np.float32),
    divisor=np.empty(0, np.float32),
    offset=np.empty(0, np.float32),
)


def edited_logits(logits: NDArray[np.float32], edits: LogitEdits | None) -> NDArray[np.float32]:
    """Apply edits: what the graph samples from, for rules that run on the host and for tests.

    Shapes: ``logits [R, V] float32`` -> a new ``[R, V] float32``. Numerics: float32, one operation after the other as
    in the graph, so both agree to the last bit.

    >>> one = np.ones(1, np.float32)
    >>> ban = LogitEdits(np.array([0]), np.array([1]), 0 * one, one, BANNED * one)
    >>> edited_logits(np.array([[2, 3]], np.float32), ban)[0].tolist() == [2.0, float(np.float32(BANNED))]
    True
    """
    edited = logits.copy()
    if edits is not None:
        biased = logits[edits.rows, edits.token_ids] + edits.bias
        repeated = np.where(biased > 0, biased / edits.divisor, biased * edits.divisor)
        edited[edits.rows, edits.token_ids] = np.maximum(repeated + edits.offset, np.float32(BANNED))
    return edited


def edit_logits_reference(
    logits: ArrayLike,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
    end_ids: Iterable[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
    logit_bias: Iterable[tuple[int, float]] = (),
) -> NDArray[np.float32]:
    """Edit the logits of one position, given all tokens before it: the oracle of ``LogitRules``.

    Shapes: ``logits [V]`` -> ``[V] float32``. Numerics: float32 in the graph's order, so equal to the last bit.

    >>> edit_logits_reference([2.0, -2.0, 2.0], [0, 1, 0], 2, repetition_penalty=2.0, frequency_penalty=0.5).tolist()
    [0.0, -4.5, 2.0]
    """
    edited = np.array(logits, np.float32)
    biases: dict[int, float] = {}
    for token_id, bias in logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    for token_id, bias in biases.items():
        edited[token_id] += np.float32(bias)
    for token_id in set(token_ids):
        logit, penalty = edited[token_id], np.float32(repetition_penalty)
        logit = logit / penalty if logit > 0 else logit * penalty
        edited[token_id] = logit + np.float32(-(presence_penalty + frequency_penalty * list(token_ids).count(token_id)))
    if len(token_ids) - num_prompt_tokens < min_tokens:
        for token_id in end_ids:
            edited[token_id] = BANNED
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(token_ids) and list(word[:-1]) == list(token_ids[len(token_ids) - num_before :]):
            edited[word[-1]] = BANNED
    return np.maximum(edited, np.float32(BANNED))

"""What the target says about the next token, over the columns that a draft's logits have."""

from __future__ import annotations

import torch
from torch import Tensor

OUTSIDE = -1


class TargetChoices:
    """The target's distributions behind P rows, computed some rows at a time: all of them would fill the memory.

    Source: EAGLE-3's reference code, where the target's logits are cut to the draft's vocabulary before the softmax and
    rows whose most likely token is outside of it have no loss.

    Shapes: ``hidden [P, h]`` what the target's lm_head reads; ``drawn_ids [P]`` the tokens that were drawn behind these
    rows; ``lm_head [V, h]``; ``columns [C, h]`` its rows for the draft's vocabulary, ``column_of [V] int64`` where each
    token is among them, -1 = nowhere; None and None = the vocabulary is the target's.

    ``is_exact`` False spares the columns outside the draft's vocabulary, four fifths of the work: a row then counts as
    having its choice outside only where the drawn token is outside and beats all columns. In training this leaves a
    loss, over what is inside, to some rows that the reference leaves out; counts are made with True.
    ``are_hard``: the drawn token is the distribution.
    """

    def __init__(
        self,
        hidden: Tensor,
        drawn_ids: Tensor,
        lm_head: Tensor,
        columns: Tensor | None = None,
        column_of: Tensor | None = None,
        *,
        dtype: torch.dtype,
        is_exact: bool,
        are_hard: bool = False,
    ) -> None:
        self._hidden, self._drawn_ids, self._lm_head = hidden.to(dtype), drawn_ids, lm_head
        self._columns = (lm_head if columns is None else columns).to(dtype)
        self._column_of, self._is_exact, self._are_hard = column_of, is_exact, are_hard
        self._whole = lm_head.to(dtype) if is_exact and column_of is not None else None

    def __len__(self) -> int:
        return len(self._hidden)

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return probabilities ``[last - first, C] float32`` and the most likely tokens' columns, -1 = outside."""
        hidden, drawn_ids = self._hidden[first:last], self._drawn_ids[first:last]
        logits = (hidden @ self._columns.T).float()
        if self._column_of is None:
            choices, drawn = logits.argmax(-1), drawn_ids
        else:
            drawn = self._column_of[drawn_ids]
            choices = self._choices(hidden, logits, drawn_ids, drawn)
        if self._are_hard:
            probs = torch.zeros_like(logits).scatter_(1, drawn.clamp(min=0)[:, None], 1.0)
            return probs, torch.where(drawn < 0, OUTSIDE, choices)
        return torch.softmax(logits, -1), choices

    def _choices(self, hidden: Tensor, logits: Tensor, drawn_ids: Tensor, drawn: Tensor) -> Tensor:
        assert self._column_of is not None
        if self._whole is not None:
            return self._column_of[(hidden @ self._whole.T).argmax(-1)]
        best = logits.max(-1)
        rivals = (hidden.float() * self._lm_head[drawn_ids].float()).sum(-1)
        return torch.where((drawn < 0) & (rivals > best.values), OUTSIDE, best.indices)

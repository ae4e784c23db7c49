"""Sequences of the target's tokens and features, padded to one length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences of at most T rows; the real rows of a sequence come first.

    Row t is token t of the text with the target's features of it: what the target computed when it read tokens 0 .. t.
    ``is_answer`` says that the target drew the token. ``features`` are the outputs of the captured layers, then the
    final hidden row, after the final norm.
    """

    token_ids: Tensor  # [B, T] int64
    is_answer: Tensor  # [B, T] bool
    is_real: Tensor  # [B, T] bool
    features: Tensor  # [B, T, F] float

"""The real rows of a batch end to end, and the rows from which a draft of the answer starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.training.batch import Batch


@dataclass(frozen=True)
class Rows:
    """N rows of S texts, without padding; rows ``starts[s] .. starts[s + 1] - 1`` are text s."""

    token_ids: Tensor  # [N] int64
    is_answer: Tensor  # [N] bool
    features: Tensor  # [N, F]
    positions: Tensor  # [N] int64, within the text
    ends: Tensor  # [N] int64, the row behind the last one of the row's text
    starts: list[int]  # [S + 1]


def real_rows(batch: Batch) -> Rows:
    """Leave the padding out."""
    lengths = batch.is_real.sum(1)
    positions = torch.arange(batch.is_real.shape[1], device=lengths.device).expand_as(batch.is_real)[batch.is_real]
    assert torch.equal(positions, torch.cat([torch.arange(n, device=lengths.device) for n in lengths.tolist()]))
    ends = lengths.cumsum(0)
    return Rows(
        token_ids=batch.token_ids[batch.is_real],
        is_answer=batch.is_answer[batch.is_real],
        features=batch.features[batch.is_real],
        positions=positions,
        ends=ends.repeat_interleave(lengths),
        starts=[0, *ends.tolist()],
    )


def draft_rows(rows: Rows, num_depths: int, share: float = 1.0) -> list[Tensor]:
    """Return the rows whose draft has a token of each depth, ascending; those of a depth are among those before.

    A random ``share`` of the drafts goes deeper than one token.

    Row t is the newest one with the target's features; token t + 1 is the root, and the token of depth d is compared
    with token t + 1 + d of the text. It counts where this token and those of lower depths are of the answer.
    """
    chosen = torch.arange(len(rows.token_ids), device=rows.token_ids.device)
    found = []
    for depth in range(1, num_depths + 1):
        drafted = chosen + 1 + depth
        is_inside = drafted < rows.ends[chosen]
        chosen, drafted = chosen[is_inside], drafted[is_inside]
        chosen = chosen[rows.is_answer[drafted]]
        found.append(chosen)
        if depth == 1 and share < 1:
            chosen = chosen[torch.rand(len(chosen), device=chosen.device) < share]
    return found

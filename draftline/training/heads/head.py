"""What every head that can be trained offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftline.training.batch import Batch
from draftline.training.heads.target_tensors import TargetTensors


@dataclass(frozen=True)
class HeadLoss:
    """Sums over a batch, so that those of two halves add up to those of the whole.

    ``loss`` has a gradient. ``num_positions`` is what it is to be divided by: the positions that count at depth 1.
    By depth, for the chains of drafts that a text's own tokens would have verified: ``num_counted``;
    ``num_correct``, those whose token is the target's choice behind the text's own tokens (top-1 agreement);
    ``num_accepted``, those where it and all tokens before it are, which is how often greedy decoding accepts a chain's
    token at this depth: ``num_accepted / num_counted`` estimates ``acceptance_rate_at``.
    """

    loss: Tensor  # [] float32
    num_positions: Tensor  # [] int64
    num_correct: Tensor  # [D] int64
    num_accepted: Tensor  # [D] int64
    num_counted: Tensor  # [D] int64


class DraftHead(nn.Module):
    """A head beside a frozen target, whose tensors are buffers that ``state_dict`` leaves out."""

    weights_file: str
    target_embedding: Tensor
    target_lm_head: Tensor

    def __init__(self, target: TargetTensors) -> None:
        super().__init__()
        self.target_config, self.target_name = target.config, target.name
        self.register_buffer("target_embedding", target.embedding, persistent=False)
        self.register_buffer("target_lm_head", target.lm_head, persistent=False)

    def losses(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        """Sum the losses of a batch and count what is right at ``num_depths`` depths, None = those that it trains."""
        raise NotImplementedError

    def forward(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        return self.losses(batch, num_depths)

    def projections(self) -> list[nn.Parameter]:
        """Return the trained projections to a vocabulary: matrices whose rows are tokens, each rare or frequent."""
        return []

    def finish(self, features: Tensor) -> dict[str, float]:
        """Make ready to be written, given ``features [N, F]`` of the data; return numbers worth telling."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Return what the published layout stores, under its names."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return the ``config.json`` of the published layout."""
        raise NotImplementedError


def compute_dtype(values: Tensor) -> torch.dtype:
    """The dtype of matrix products: autocast's where it is on."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of rows ``[..., h]`` in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight

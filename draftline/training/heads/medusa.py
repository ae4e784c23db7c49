"""Medusa heads on a frozen target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.training.batch import Batch
from draftline.training.heads.eagle import count_chains
from draftline.training.heads.head import DraftHead, HeadLoss, compute_dtype
from draftline.training.heads.rows import draft_rows, real_rows
from draftline.training.heads.soft_cross_entropy import soft_cross_entropy
from draftline.training.heads.target_choices import TargetChoices
from draftline.training.heads.target_tensors import TargetTensors


def describe_medusa(target: CheckpointConfig, num_heads: int, *, owns_lm_heads: bool) -> HeadConfig:
    """Describe heads of one residual block each, with a projection to the vocabulary of their own or the target's."""
    return HeadConfig(
        method="medusa",
        dtype="bfloat16",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=num_heads,
        owns_medusa_lm_heads=owns_lm_heads,
    )


class MedusaHeads(DraftHead):
    """Medusa-1 (Cai et al., arXiv 2401.10774): head k proposes the token k + 1 behind the one that the target draws.

    Source: section 2.2.1 and the reference code: ``x + SiLU(W x + b)`` with W and b zero at the start (so a head starts
    as the target's own lm_head), then a projection that starts as the target's. The loss is the sum over heads of
    ``decay ** k`` (0.8) times the cross-entropy.

    ``are_hard`` True is what is published, the text's token as label. False takes the target's own distribution of that
    row as EAGLE does, which says more of a sampled text than one draw: not published for Medusa-1, self-distillation in
    section 2.3.2. A projection of their own is published; for a small target it is as large as the target, and sharing
    the target's (TGI's second version) leaves the residual block alone to train.
    """

    weights_file = "medusa_lm_head.safetensors"

    def __init__(self, config: HeadConfig, target: TargetTensors, *, decay: float, are_hard: bool) -> None:
        super().__init__(target)
        assert config.method == "medusa"
        assert config.num_layers == 1
        self.head_config, self.decay, self.are_hard = config, decay, are_hard
        self.blocks = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(config.num_heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        self.lm_heads = nn.ParameterList(
            nn.Parameter(target.lm_head.clone()) for _ in range(config.num_heads if config.owns_medusa_lm_heads else 0)
        )

    def losses(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        """Sum the losses of all heads; there are no depths beyond."""
        rows = real_rows(batch)
        by_depth = draft_rows(rows, min(num_depths or len(self.blocks), len(self.blocks)))
        first, features = by_depth[0], rows.features[:, -self.head_config.hidden_size :].float()
        dtype = compute_dtype(self.target_lm_head)
        targets = TargetChoices(
            features[first + 1],
            rows.token_ids[first + 2],
            self.target_lm_head,
            dtype=dtype,
            is_exact=not self.training,
            are_hard=self.are_hard,
        )
        hidden = [self._block(head, features[chosen]) for head, chosen in enumerate(by_depth)]
        target_rows = [torch.searchsorted(first, chosen + head) for head, chosen in enumerate(by_depth)]
        weights = [self.decay**head for head in range(len(by_depth))]
        if not len(self.lm_heads):
            result = soft_cross_entropy(hidden, self.target_lm_head, targets, target_rows, weights, dtype)
            return count_chains(result.loss, result.is_counted[0], result.is_correct, by_depth)
        results = [
            soft_cross_entropy([x], self.lm_heads[head], targets, [target_rows[head]], [weights[head]], dtype)
            for head, x in enumerate(hidden)
        ]
        loss = torch.stack([result.loss for result in results]).sum()
        is_correct = [result.is_correct[0] for result in results]
        return count_chains(loss, results[0].is_counted[0], is_correct, by_depth)

    def logits(self, head: int, final: Tensor) -> Tensor:
        """Return what a head says behind final hidden rows ``[R, h]``: ``[R, V]``."""
        lm_head = self.lm_heads[head] if len(self.lm_heads) else self.target_lm_head
        return functional.linear(self._block(head, final), lm_head)

    def projections(self) -> list[nn.Parameter]:
        return list(self.lm_heads)

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for head, block in enumerate(self.blocks):
            found |= {f"{head}.0.linear.{name}": value for name, value in block.named_parameters()}
        return found | {f"{head}.1.weight": lm_head for head, lm_head in enumerate(self.lm_heads)}

    def config(self) -> dict[str, Any]:
        return {
            "medusa_num_heads": self.head_config.num_heads,
            "medusa_num_layers": self.head_config.num_layers,
            "base_model_name_or_path": self.target_name,
            "hidden_size": self.head_config.hidden_size,
            "vocab_size": self.head_config.vocab_size,
        }

    def _block(self, head: int, x: Tensor) -> Tensor:
        return x + functional.silu(self.blocks[head](x))

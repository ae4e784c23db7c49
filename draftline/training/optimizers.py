"""Muon for the matrices of a head, AdamW for the rest.

Source: Muon (Jordan et al., 2024; Liu et al., arXiv 2502.16982, whose scaling lets one rate do for matrices of all
shapes): the momentum of a matrix is made orthogonal before it is added, so that no direction is left behind in a
short training. Projections to a vocabulary, norms and biases are AdamW's, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from draftline.training.heads.head import DraftHead

BETAS = (0.9, 0.95)  # EAGLE-3's, arXiv 2503.01840, appendix A
MOMENTUM = 0.95


class Optimizers:
    """One step takes both. ``learning_rate`` and ``matrix_learning_rate`` are the highest rates."""

    def __init__(self, head: DraftHead, learning_rate: float, matrix_learning_rate: float) -> None:
        projections = {id(parameter) for parameter in head.projections()}
        self.parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
        matrices = [one for one in self.parameters if one.ndim == 2 and id(one) not in projections]
        taken = {id(matrix) for matrix in matrices}
        others = [one for one in self.parameters if id(one) not in taken]
        self._optimizers: dict[str, tuple[Optimizer, float]] = {}
        if matrices:
            muon = torch.optim.Muon(matrices, weight_decay=0.0, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
            self._optimizers["muon"] = muon, matrix_learning_rate
        if others:
            adamw = torch.optim.AdamW(others, betas=BETAS, weight_decay=0.0, fused=True)
            self._optimizers["adamw"] = adamw, learning_rate

    def zero_grad(self) -> None:
        for optimizer, _ in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def step(self, share: float) -> None:
        """Take a step at ``share`` of the highest rates."""
        for optimizer, highest in self._optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = share * highest
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, (optimizer, _) in self._optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, (optimizer, _) in self._optimizers.items():
            optimizer.load_state_dict(state[name])

"""Cross-entropy between the target's distributions and a draft's, fused with the projection to the vocabulary."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftline.training.heads.target_choices import TargetChoices

# Rows whose logits exist at once: in float32, a few megabytes, which stay in a processor's cache.
CHUNK_ROWS = {"cpu": 256, "cuda": 2048}
# Rows between two additions to the projection's gradient, which is as large as the projection.
GRADIENT_ROWS = 2048


class SoftCrossEntropy(NamedTuple):
    """``loss []`` with a gradient; by row, ``is_counted``: it has a loss; ``is_correct``: its best is the target's."""

    loss: Tensor
    is_counted: Tensor  # [M] bool
    is_correct: Tensor  # [M] bool


def soft_cross_entropy(
    hidden: Tensor, lm_head: Tensor, targets: TargetChoices, target_rows: Tensor, weights: Tensor, dtype: torch.dtype
) -> SoftCrossEntropy:
    """Sum ``weight * -sum(softmax(target) * log_softmax(hidden lm_head^T))`` over rows.

    The gradient is computed with the loss, some rows at a time: probabilities minus the target's. So neither logits nor
    their logarithms of all rows exist, and every distribution of the target is computed once however many rows it has.

    Shapes: ``hidden [M, h]``, ``lm_head [C, h]``, ``target_rows [M]`` ascending, ``weights [M] float32``. Products are
    in ``dtype``; softmax, loss and sums of gradients in float32. Rows whose target's choice is outside the draft's
    vocabulary have no loss and are never correct.
    """
    assert bool((target_rows[1:] >= target_rows[:-1]).all())
    is_training = torch.is_grad_enabled() and (hidden.requires_grad or lm_head.requires_grad)
    loss, is_counted, is_correct = _Fused.apply(  # type: ignore[no-untyped-call]
        hidden, lm_head, targets, target_rows, weights, dtype, is_training
    )
    return SoftCrossEntropy(loss, is_counted, is_correct)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        targets: TargetChoices,
        target_rows: Tensor,
        weights: Tensor,
        dtype: torch.dtype,
        is_training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, device = len(hidden), hidden.device
        x, projection = hidden.to(dtype), lm_head.to(dtype)
        loss = torch.zeros((), device=device)
        is_counted, is_correct = (torch.zeros(num_rows, dtype=torch.bool, device=device) for _ in range(2))
        gradients = _Gradients(hidden, lm_head, x, projection) if is_training else None
        for first, last, first_target, last_target in _chunks(target_rows, len(targets)):
            probs, choices = targets.rows(first_target, last_target)
            local = target_rows[first:last] - first_target
            choice, weight = choices[local], weights[first:last]
            probs = probs[local]
            is_counted[first:last] = choice >= 0
            weight = torch.where(choice >= 0, weight, 0.0)
            logits = (x[first:last] @ projection.T).float()
            is_correct[first:last] = logits.argmax(-1) == choice
            logits -= logits.amax(-1, keepdim=True)
            expected = torch.linalg.vecdot(probs, logits)
            masses = logits.exp_().sum(-1)
            loss += (weight * (masses.log() - expected)).sum()
            if gradients is not None:
                logits *= (weight / masses)[:, None]
                gradients.add(first, last, logits.sub_(probs.mul_(weight[:, None])).to(dtype))
        if gradients is not None:
            ctx.save_for_backward(*gradients.finish())
        ctx.mark_non_differentiable(is_counted, is_correct)
        return loss, is_counted, is_correct

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_hidden, of_lm_head = ctx.saved_tensors
        lm_head_needs = ctx.needs_input_grad[1]
        return of_hidden * of_loss, of_lm_head * of_loss if lm_head_needs else None, None, None, None, None, None


class _Gradients:
    """Gradients of hidden rows and of the projection, from those of the logits of chunk after chunk."""

    def __init__(self, hidden: Tensor, lm_head: Tensor, x: Tensor, projection: Tensor) -> None:
        self._x, self._projection = x, projection
        self._of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        self._of_lm_head = torch.zeros_like(lm_head if lm_head.requires_grad else lm_head[:0])
        self._waiting: list[Tensor] = []
        self._first = self._last = 0

    def add(self, first: int, last: int, of_logits: Tensor) -> None:
        self._of_hidden[first:last] = of_logits @ self._projection
        if len(self._of_lm_head):
            self._waiting.append(of_logits)
            self._last = last
            if last - self._first >= GRADIENT_ROWS:
                self._flush()

    def finish(self) -> tuple[Tensor, Tensor]:
        self._flush()
        return self._of_hidden, self._of_lm_head

    def _flush(self) -> None:
        if self._waiting:
            self._of_lm_head += torch.cat(self._waiting).T @ self._x[self._first : self._last]
            self._first, self._waiting = self._last, []


def _chunks(target_rows: Tensor, num_targets: int) -> list[tuple[int, int, int, int]]:
    """Cut rows into runs with all rows of some targets each: first and last row, first and last target."""
    if not len(target_rows):
        return []
    rows_per_target = max(1.0, len(target_rows) / num_targets)
    size = max(1, int(CHUNK_ROWS[target_rows.device.type] / rows_per_target))
    borders = torch.arange(0, num_targets, size, device=target_rows.device)
    firsts = [*torch.searchsorted(target_rows, borders).tolist(), len(target_rows)]
    cuts = [*borders.tolist(), num_targets]
    return [(*rows, *cuts[i : i + 2]) for i, rows in enumerate(itertools.pairwise(firsts)) if rows[0] < rows[1]]

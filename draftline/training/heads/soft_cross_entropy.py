"""Cross-entropy between the target's distributions and a draft's, fused with the projection to the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftline.training.heads.target_choices import TargetChoices

# Logits that exist at once: in float32, some megabytes, which stay in a processor's cache.
CHUNK_LOGITS = {"cpu": 256 * 12288, "cuda": 2048 * 32768}
# Rows between two additions to the gradient of the projection, which is as large as the projection.
GRADIENT_ROWS = 2048


class SoftCrossEntropy(NamedTuple):
    """``loss []`` with a gradient; by row, ``is_counted``: it has a loss; ``is_correct``: its best is the target's."""

    loss: Tensor
    is_counted: list[Tensor]  # by depth, [R] bool
    is_correct: list[Tensor]


def soft_cross_entropy(
    hidden: Sequence[Tensor],
    lm_head: Tensor,
    targets: TargetChoices,
    target_rows: Sequence[Tensor],
    weights: Sequence[float],
    dtype: torch.dtype,
) -> SoftCrossEntropy:
    """Sum ``weight * -sum(softmax(target) * log_softmax(hidden lm_head^T))`` over the rows of several depths.

    The gradient is computed with the loss, some rows at a time: probabilities minus the target's. So neither logits nor
    their logarithms of all rows exist, and every distribution of the target is computed once for all depths.

    Shapes, by depth: ``hidden [R, h]``, ``target_rows [R]`` each once, most of the targets; ``lm_head [C, h]``.
    Products are in ``dtype``; softmax, loss and sums of gradients in float32. Rows whose target's choice is outside the
    draft's vocabulary have no loss and are never correct.
    """
    assert len(hidden) == len(target_rows) == len(weights)
    # A row for every target at every depth, so that probabilities of the target are nowhere gathered.
    is_there = torch.zeros(len(hidden), len(targets), dtype=torch.bool, device=lm_head.device)
    rows_of_all = []
    for depth, (x, rows) in enumerate(zip(hidden, target_rows, strict=True)):
        is_there[depth, rows] = True
        rows_of_all.append(x.new_zeros(len(targets), x.shape[1], dtype=torch.float32).index_copy(0, rows, x.float()))
    x = torch.stack(rows_of_all)
    is_training = torch.is_grad_enabled() and (x.requires_grad or lm_head.requires_grad)
    loss, is_counted, is_correct = _Fused.apply(  # type: ignore[no-untyped-call]
        x, lm_head, targets, is_there, weights, dtype, is_training
    )
    return SoftCrossEntropy(
        loss,
        [found[rows] for found, rows in zip(is_counted, target_rows, strict=True)],
        [found[rows] for found, rows in zip(is_correct, target_rows, strict=True)],
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [D, P, h]
        lm_head: Tensor,
        targets: TargetChoices,
        is_there: Tensor,  # [D, P]
        weights: Sequence[float],
        dtype: torch.dtype,
        is_training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = max(1, CHUNK_LOGITS[hidden.device.type] // len(lm_head))
        x, projection = hidden.to(dtype), lm_head.to(dtype)
        loss = torch.zeros((), device=hidden.device)
        is_counted, is_correct = torch.zeros_like(is_there), torch.zeros_like(is_there)
        gradients = _Gradients(x, projection, lm_head.requires_grad) if is_training else None
        for first in range(0, len(targets), size):
            chunk = slice(first, min(first + size, len(targets)))
            probs, choices = targets.rows(chunk.start, chunk.stop)
            for depth, weight in enumerate(weights):
                rows, those = _find_rows(is_there[depth], chunk)
                of_target, choice = probs[those], choices[those]
                logits = (x[depth, rows] @ projection.T).float()
                has_loss = is_there[depth, rows] & (choice >= 0)
                row_weights = has_loss * weight
                is_counted[depth, rows] = has_loss
                is_correct[depth, rows] = has_loss & (logits.argmax(-1) == choice)
                logits -= logits.amax(-1, keepdim=True)
                expected = torch.linalg.vecdot(of_target, logits)
                masses = logits.exp_().sum(-1)
                loss += (row_weights * (masses.log() - expected)).sum()
                if gradients is not None and weight:
                    logits /= masses[:, None]
                    logits -= of_target
                    logits *= row_weights[:, None]
                    gradients.add(depth, rows, logits)
        if gradients is not None:
            ctx.save_for_backward(*gradients.finish())
        ctx.mark_non_differentiable(is_counted, is_correct)
        return loss, is_counted, is_correct

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        of_hidden, of_lm_head = ctx.saved_tensors
        lm_head_needs = ctx.needs_input_grad[1]
        return of_hidden * of_loss, of_lm_head * of_loss if lm_head_needs else None, None, None, None, None, None


def _find_rows(is_there: Tensor, chunk: slice) -> tuple[slice | Tensor, slice | Tensor]:
    """Return the rows of a chunk that are there, and their places in it; all where most are, to gather nothing."""
    places = is_there[chunk].nonzero()[:, 0]
    if 2 * len(places) > chunk.stop - chunk.start:
        return chunk, slice(None)
    return places + chunk.start, places


class _Gradients:
    """Gradients of hidden rows and of the projection, from those of the logits of chunk after chunk.

    Those of the projection are added up in float32, however many chunks there are.
    """

    def __init__(self, x: Tensor, projection: Tensor, projection_needs: bool) -> None:
        self._x, self._projection, (num_columns, width) = x, projection, projection.shape
        self._of_hidden = torch.zeros_like(x, dtype=torch.float32)
        self._of_projection = projection.new_zeros(projection_needs * num_columns, width, dtype=torch.float32)
        chunk = max(1, CHUNK_LOGITS[x.device.type] // num_columns)
        most = min(x.shape[0] * x.shape[1], GRADIENT_ROWS + chunk) if projection_needs else 0
        self._waiting, self._waiting_x = x.new_empty(most, num_columns), x.new_empty(most, width)
        self._num_waiting = 0

    def add(self, depth: int, rows: slice | Tensor, of_logits: Tensor) -> None:
        if not len(self._of_projection):
            self._of_hidden[depth, rows] = (of_logits.to(self._x.dtype) @ self._projection).float()
            return
        waiting = slice(self._num_waiting, self._num_waiting + len(of_logits))
        self._waiting[waiting], self._waiting_x[waiting] = of_logits, self._x[depth, rows]
        self._of_hidden[depth, rows] = (self._waiting[waiting] @ self._projection).float()
        self._num_waiting = waiting.stop
        if self._num_waiting >= GRADIENT_ROWS:
            self._flush()

    def finish(self) -> tuple[Tensor, Tensor]:
        self._flush()
        return self._of_hidden, self._of_projection

    def _flush(self) -> None:
        if self._num_waiting:
            self._of_projection += self._waiting[: self._num_waiting].T @ self._waiting_x[: self._num_waiting]
            self._num_waiting = 0

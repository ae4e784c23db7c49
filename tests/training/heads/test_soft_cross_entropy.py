"""The fused loss is the plain one, and so are its gradients; the target's choices over a part of its vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftline.training.heads import soft_cross_entropy as module
from draftline.training.heads.soft_cross_entropy import soft_cross_entropy
from draftline.training.heads.target_choices import OUTSIDE, TargetChoices

VOCAB, HIDDEN = 40, 8


def make_targets(seed: int, num_rows: int, columns: Tensor | None, *, is_exact: bool, are_hard: bool) -> TargetChoices:
    generator = torch.Generator().manual_seed(seed)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
    column_of = None
    if columns is not None:
        column_of = torch.full((VOCAB,), OUTSIDE)
        column_of[columns] = torch.arange(len(columns))
    return TargetChoices(
        torch.randn(num_rows, HIDDEN, generator=generator),
        torch.randint(0, VOCAB, (num_rows,), generator=generator),
        lm_head,
        None if columns is None else lm_head[columns],
        column_of,
        dtype=torch.float32,
        is_exact=is_exact,
        are_hard=are_hard,
    )


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_the_fused_loss_and_its_gradients_are_the_plain_ones(data: st.DataObject) -> None:
    num_targets = data.draw(st.integers(1, 30))
    num_columns = data.draw(st.integers(2, VOCAB))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(VOCAB, generator=generator)[:num_columns].sort().values
    targets = make_targets(
        seed,
        num_targets,
        None if num_columns == VOCAB else columns,
        is_exact=data.draw(st.booleans()),
        are_hard=data.draw(st.booleans()),
    )
    subsets = data.draw(st.lists(st.sets(st.integers(0, num_targets - 1)), min_size=1, max_size=3))
    target_rows = [torch.tensor(sorted(rows), dtype=torch.int64) for rows in subsets]
    weights = [0.8**depth for depth in range(len(subsets))]
    hidden = [torch.randn(len(rows), HIDDEN, generator=generator, requires_grad=True) for rows in target_rows]
    lm_head = torch.randn(num_columns, HIDDEN, generator=generator, requires_grad=data.draw(st.booleans()))

    probs, choices = targets.rows(0, num_targets)
    plain, counted, correct = torch.zeros(()), [], []
    for x, rows, weight in zip(hidden, target_rows, weights, strict=True):
        logits = x @ lm_head.T
        losses = -(probs[rows] * torch.log_softmax(logits, -1)).sum(-1)
        counted.append(choices[rows] >= 0)
        correct.append(logits.argmax(-1) == choices[rows])
        plain = plain + weight * losses[counted[-1]].sum()
    leaves = [*hidden, lm_head] if lm_head.requires_grad else hidden
    expected = torch.autograd.grad(3 * plain, leaves)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK_LOGITS, "cpu", num_columns * data.draw(st.integers(1, 8)))
        patch.setattr(module, "GRADIENT_ROWS", data.draw(st.integers(1, 20)))
        result = soft_cross_entropy(hidden, lm_head, targets, target_rows, weights, torch.float32)
    torch.testing.assert_close(result.loss, plain, rtol=1e-4, atol=1e-4)
    assert [found.tolist() for found in result.is_counted] == [found.tolist() for found in counted]
    assert [found.tolist() for found in result.is_correct] == [found.tolist() for found in correct]
    for found, gradient in zip(torch.autograd.grad(3 * result.loss, leaves), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection_needs", [True, False])
def test_products_in_bfloat16_give_the_same_but_for_their_rounding(projection_needs: bool) -> None:
    """Gradients are sums of products whose factors were rounded to 8 bits: to 2 % of the largest."""
    targets, generator = make_targets(3, 16, None, is_exact=False, are_hard=False), torch.Generator().manual_seed(1)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_(projection_needs)
    rows = [torch.arange(16), torch.tensor([2, 7, 11])]  # of the second depth a few alone: those are gathered
    hidden = [torch.randn(len(chosen), HIDDEN, generator=generator, requires_grad=True) for chosen in rows]
    leaves = [*hidden, lm_head] if projection_needs else hidden
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        result = soft_cross_entropy(hidden, lm_head, targets, rows, [1.0, 0.8], dtype)
        gradients.append(torch.autograd.grad(result.loss, leaves))
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_nothing_of_a_gradient_is_computed_without_one() -> None:
    targets = make_targets(0, 5, None, is_exact=True, are_hard=False)
    lm_head = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    with torch.no_grad():
        result = soft_cross_entropy([torch.randn(5, HIDDEN)], lm_head, targets, [torch.arange(5)], [1.0], torch.float32)
    assert not result.loss.requires_grad


def test_choices_outside_of_the_vocabulary() -> None:
    """Exact: the best of all tokens. Otherwise a token outside is seen where it was drawn and beats all inside."""
    lm_head = torch.eye(4)
    column_of = torch.tensor([0, -1, 1, -1])
    hidden = torch.tensor([[3.0, 2, 0, 0], [0, 5, 1, 0], [0, 5, 1, 0], [1, 0, 0, 2], [4, 0, 0, 2]])
    drawn = torch.tensor([0, 1, 2, 3, 3])
    columns = lm_head[[0, 2]]
    for is_exact, expected in ((True, [0, -1, -1, -1, 0]), (False, [0, -1, 1, -1, 0])):
        targets = TargetChoices(hidden, drawn, lm_head, columns, column_of, dtype=torch.float32, is_exact=is_exact)
        probs, choices = targets.rows(0, 5)
        assert choices.tolist() == expected
        torch.testing.assert_close(probs, torch.softmax(hidden[:, [0, 2]], -1))
        assert targets.rows(1, 3)[1].tolist() == expected[1:3]
    hard = TargetChoices(
        hidden, drawn, lm_head, columns, column_of, dtype=torch.float32, is_exact=True, are_hard=True
    ).rows(0, 3)
    assert hard[0][[0, 2]].tolist() == [[1, 0], [0, 1]]
    assert hard[1].tolist() == [0, -1, -1]

"""Losses and counts of heads: against a dense reference, over halves of a batch, in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.errors import CheckpointError
from draftline.training.batch import Batch
from draftline.training.heads import DraftHead, Eagle1Head, Eagle3Head, HeadLoss, MedusaHeads
from draftline.training.heads.rows import draft_rows, real_rows
from tests.training.heads.dense_reference import DenseEagle3
from tests.training.tiny_heads import HEADS, HeadName, TinyTarget, make_batch, make_head, make_target, random_texts

LENGTHS = (9, 23, 14)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_target(tmp_path_factory.mktemp("losses"), tie=True)


@pytest.fixture(scope="module")
def batch(target: TinyTarget) -> Batch:
    """Texts with a prompt; the last one has a turn of the user's within."""
    answers = [[row >= length // 3 for row in range(length)] for length in LENGTHS]
    answers[2][8:10] = [False, False]
    return make_batch(target, random_texts(1, LENGTHS), answers)


def part(batch: Batch, rows: Sequence[int]) -> Batch:
    return Batch(*(getattr(batch, field.name)[list(rows)] for field in fields(Batch)))


def gradients(head: DraftHead, batch: Batch) -> tuple[HeadLoss, dict[str, torch.Tensor]]:
    head.zero_grad()
    result = head(batch)
    result.loss.backward()
    return result, {name: value.grad.clone() for name, value in head.named_parameters() if value.grad is not None}


def test_a_finished_eagle3_head_fits_into_float16_and_drafts_as_before(target: TinyTarget, batch: Batch) -> None:
    """A power of two is exact; the tolerance is what the norms' epsilon is beside a stream of 2 to the 12."""
    head = make_head("eagle3", target.tensors, steps=4)
    assert isinstance(head, Eagle3Head)
    features = batch.features[batch.features.isfinite().all(-1)]  # without padding
    assert head.finish(features) == {"stream_scale": 1.0}
    with torch.no_grad():
        for matrix in (head.fc.weight, head.layer.o_proj.weight, head.layer.down_proj.weight):
            matrix.mul_(2.0**26)
    before, columns = head(batch), slice(None, -head.head_config.target_hidden_size)
    scale = head.finish(features)["stream_scale"]
    assert math.log2(scale) == round(math.log2(scale)) < 0
    assert 2**11 < float(head.fc(features[:, columns]).detach().abs().max()) <= 2**12
    after = head(batch)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-5, atol=0)
    assert torch.equal(after.num_accepted, before.num_accepted)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_eagle3_is_the_dense_reference(target: TinyTarget, batch: Batch, steps: int) -> None:
    head = make_head("eagle3", target.tensors, steps=steps)
    assert isinstance(head, Eagle3Head)
    result, found = gradients(head, batch)
    dense = DenseEagle3(head)
    loss, num_positions, counts = dense.loss(batch)
    loss.backward()
    assert 0 < num_positions < int(result.num_counted[0])  # some choices are outside the draft's vocabulary
    torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-5, atol=0)
    assert int(result.num_positions) == num_positions
    by_depth = torch.stack([result.num_correct, result.num_accepted, result.num_counted], 1)
    assert by_depth.tolist() == counts
    for name, weight in dense.weights.items():
        scale = float(weight.grad.abs().max())
        torch.testing.assert_close(found[name].double(), weight.grad, rtol=0, atol=2e-5 * scale, msg=name)
    assert found.keys() == dense.weights.keys()


def test_a_share_of_chains_goes_deeper_and_counts_for_the_rest(target: TinyTarget, batch: Batch) -> None:
    """The mean of many draws is the loss of all chains, within five standard errors; evaluation takes all."""
    whole, part = (make_head("eagle3", target.tensors, ttt_share=share) for share in (1.0, 0.4))
    assert torch.equal(whole(batch).loss, part(batch).loss)
    expected = float(whole.train()(batch).loss.detach())
    losses, shares = [], []
    for seed in range(300):
        torch.manual_seed(seed)
        result = part.train()(batch)
        losses.append(float(result.loss.detach()))
        first, *deeper = result.num_counted.tolist()
        assert first == int(whole(batch).num_counted[0])
        shares.append(deeper[0] / int(whole(batch).num_counted[1]))
        assert deeper == sorted(deeper, reverse=True)
    error = torch.tensor(losses).std() / len(losses) ** 0.5
    assert abs(sum(losses) / len(losses) - expected) < 5 * float(error)
    assert float(error) > 0
    assert 0.37 < sum(shares) / len(shares) < 0.43


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_chains_see_what_the_dense_mask_shows(target: TinyTarget, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    answers = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    steps = data.draw(st.integers(1, 4))
    size = target.tensors.config.hidden_size
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    is_real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    features = torch.randn(*is_real.shape, 3 * size, generator=generator)
    features[~is_real] = torch.nan
    padded = torch.tensor([[*row, *[True] * (max(lengths) - len(row))] for row in answers])
    batch = Batch(torch.randint(3, 260, is_real.shape, generator=generator), padded, is_real, features)
    head = make_head("eagle3", target.tensors, steps=steps)
    assert isinstance(head, Eagle3Head)
    dense, rows = DenseEagle3(head), real_rows(batch)
    with torch.no_grad():
        by_text = [
            dense.outputs(batch.token_ids[text, :n], batch.features[text, :n], steps) for text, n in enumerate(lengths)
        ]
        for step, (chosen, hidden) in enumerate(head.chains(rows, steps)):
            starts = [
                sum(lengths[:text]) + row
                for text, n in enumerate(lengths)
                for row in range(n)
                if row + 2 + step < n and all(answers[text][row + 2 : row + 3 + step])
            ]
            assert chosen.tolist() == starts
            expected = torch.cat([outputs[step] for outputs in by_text])[chosen]
            torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_halves_of_a_batch_sum_to_the_whole(target: TinyTarget, batch: Batch, name: HeadName) -> None:
    head = make_head(name, target.tensors)
    whole, of_whole = gradients(head, batch)
    parts = [gradients(head, part(batch, rows)) for rows in ([0], [1, 2])]
    for field in fields(HeadLoss):
        total = sum(getattr(result, field.name) for result, _ in parts)
        torch.testing.assert_close(total, getattr(whole, field.name), rtol=1e-5, atol=0, msg=field.name)
    for key, gradient in of_whole.items():
        torch.testing.assert_close(sum(found[key] for _, found in parts), gradient, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_outside_the_answers_has_a_loss(target: TinyTarget, batch: Batch, name: HeadName) -> None:
    """Tokens and features behind the last answer change nothing; padding is never read (it is NaN here)."""
    head = make_head(name, target.tensors)
    until = replace(batch, is_answer=batch.is_answer & (torch.arange(23) < 7))
    changed = replace(until, token_ids=until.token_ids.clone(), features=until.features.clone())
    changed.token_ids[:, 7:] = 5
    changed.features[:, 7:] = 3.0
    before, after = head(until), head(changed)
    assert math.isfinite(float(before.loss.detach()))
    for field in fields(HeadLoss):
        torch.testing.assert_close(getattr(before, field.name), getattr(after, field.name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", HEADS)
def test_a_batch_without_answers_is_nothing(target: TinyTarget, batch: Batch, name: HeadName) -> None:
    head = make_head(name, target.tensors).train()
    result, found = gradients(head, replace(batch, is_answer=torch.zeros_like(batch.is_answer)))
    assert float(result.loss.detach()) == 0
    assert int(result.num_positions) == 0
    assert result.num_counted.tolist() == [0] * len(result.num_counted)
    assert all(not gradient.any() for gradient in found.values())


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_stays_near(target: TinyTarget, batch: Batch, name: HeadName) -> None:
    head = make_head(name, target.tensors)
    exact, of_exact = gradients(head, batch)
    head.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = head(batch)
    assert result.loss.dtype == torch.float32
    result.loss.backward()
    torch.testing.assert_close(result.loss, exact.loss, rtol=0.01, atol=0)
    for key, parameter in head.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - of_exact[key]).norm() / of_exact[key].norm()
        assert float(error) < 0.05, key


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_depths_beyond_the_trained_ones_are_counted(target: TinyTarget, batch: Batch, name: HeadName) -> None:
    trained, deeper = make_head(name, target.tensors, steps=1), make_head(name, target.tensors, steps=3)
    with torch.no_grad():
        one, three = trained(batch), trained(batch, 3)
        assert len(one.num_counted) == 1
        torch.testing.assert_close(one.loss, three.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(three.num_accepted, deeper(batch, 3).num_accepted)
    accepted, counted = three.num_accepted.tolist(), three.num_counted.tolist()
    assert accepted == sorted(accepted, reverse=True)
    assert counted == sorted(counted, reverse=True)
    assert counted[2] > 0
    for depth in range(3):
        assert accepted[depth] <= int(three.num_correct[depth]) <= counted[depth]


def test_eagle1_is_the_published_loss(target: TinyTarget, batch: Batch) -> None:
    head = make_head("eagle1", target.tensors)
    assert isinstance(head, Eagle1Head)
    rows = real_rows(batch)
    ((chosen, hidden),) = head.chains(rows, 1)
    features = rows.features[chosen + 1, -64:]
    lm_head = target.tensors.lm_head
    probs, log_probs = torch.softmax(features @ lm_head.T, -1), torch.log_softmax(hidden @ lm_head.T, -1)
    distance = torch.nn.functional.smooth_l1_loss(hidden, features, reduction="none").mean(-1).sum()
    expected = distance - 0.1 * (probs * log_probs).sum()
    torch.testing.assert_close(head(batch).loss, expected, rtol=1e-5, atol=0)


def test_noise_is_added_in_training_alone(target: TinyTarget, batch: Batch) -> None:
    head, silent = make_head("eagle1", target.tensors), make_head("eagle1", target.tensors, feature_noise=0.0)
    torch.testing.assert_close(head(batch).loss, silent(batch).loss, rtol=0, atol=0)
    assert float(head.train()(batch).loss.detach()) != float(silent.train()(batch).loss.detach())


@pytest.mark.parametrize("are_hard", [True, False])
def test_medusa_is_the_weighted_sum_over_heads(target: TinyTarget, batch: Batch, are_hard: bool) -> None:
    head = make_head("medusa-shared", target.tensors, are_hard=are_hard)
    assert isinstance(head, MedusaHeads)
    rows = real_rows(batch)
    final, expected = rows.features[:, -64:], torch.zeros(())
    for index, chosen in enumerate(draft_rows(rows, 3)):
        log_probs = torch.log_softmax(head.logits(index, final[chosen]), -1)
        labels = torch.softmax(final[chosen + 1 + index] @ target.tensors.lm_head.T, -1)
        if are_hard:
            labels = torch.nn.functional.one_hot(rows.token_ids[chosen + 2 + index], 320).float()
        expected = expected - 0.8**index * (labels * log_probs).sum()
    torch.testing.assert_close(head(batch).loss, expected, rtol=1e-5, atol=0)


def test_features_of_other_layers_are_refused(target: TinyTarget, batch: Batch) -> None:
    head = make_head("eagle3", target.tensors)
    with pytest.raises(CheckpointError, match=r"features: a row has features of 2 layers .* got 128"):
        head(replace(batch, features=batch.features[..., 64:]))

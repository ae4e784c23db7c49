"""Which weights Muon trains and which AdamW, how a head starts, and that a state goes on as it was left."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from draftline.training.heads import DraftHead, Eagle1Head, Eagle3Head, describe_eagle1, describe_eagle3
from draftline.training.optimizers import Optimizers
from tests.training.tiny_heads import HEADS, HeadName, TinyTarget, make_batch, make_head, make_target, random_texts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_target(tmp_path_factory.mktemp("optimizers"), tie=True)


def of_muon(optimizers: Optimizers, head: DraftHead) -> set[str]:
    muon, _ = optimizers._optimizers["muon"]
    taken = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    return {name for name, parameter in head.named_parameters() if id(parameter) in taken}


def take_step(head: DraftHead, optimizers: Optimizers, target: TinyTarget, seed: int) -> None:
    torch.manual_seed(seed)
    texts = random_texts(seed, (9, 14))
    losses = head.losses(make_batch(target, texts, [[True] * len(text) for text in texts]))
    optimizers.zero_grad()
    torch.autograd.backward(losses.loss)
    optimizers.step(0.5)


@pytest.mark.parametrize("name", HEADS)
def test_muon_trains_matrices_and_adamw_the_rest(target: TinyTarget, name: HeadName) -> None:
    head = make_head(name, target.tensors)
    muons = of_muon(Optimizers(head, 0.1, 0.2), head)
    parameters = dict(head.named_parameters())
    assert all(parameters[one].ndim == 2 for one in muons)
    rest = {one for one, parameter in parameters.items() if parameter.ndim == 2} - muons
    assert all("lm_head" in one for one in rest)
    assert not any("lm_head" in one for one in muons)


@pytest.mark.parametrize("name", HEADS)
def test_every_weight_moves_and_a_loaded_state_goes_on_identically(target: TinyTarget, name: HeadName) -> None:
    head = make_head(name, target.tensors)
    before = copy.deepcopy(head.state_dict())
    optimizers = Optimizers(head, 0.01, 0.02)
    take_step(head, optimizers, target, 1)
    moved = {key for key, value in head.state_dict().items() if not torch.equal(value, before[key])}
    assert moved == {key for key, parameter in head.named_parameters() if parameter.requires_grad}
    again = make_head(name, target.tensors)
    again.load_state_dict(head.state_dict())
    others = Optimizers(again, 0.01, 0.02)
    others.load_state_dict(copy.deepcopy(optimizers.state_dict()))
    for one, its in ((head, optimizers), (again, others)):
        take_step(one, its, target, 2)
    for key, value in head.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, rtol=0, atol=0)


def test_eagle_heads_start_with_the_last_feature_and_the_targets_norm(target: TinyTarget) -> None:
    config = target.tensors.config
    eagle1 = describe_eagle1(config), {"feature_noise": 0.2, "regression_weight": 1.0, "classification_weight": 0.1}
    heads = [Eagle1Head(eagle1[0], target.tensors, **eagle1[1])]
    description = describe_eagle3(config, (0, 2), 200)
    heads.append(Eagle3Head(description, target.tensors, np.arange(200), ttt_steps=1, ttt_decay=0.8))
    for head in heads:
        start = head.fc.weight[:, -config.hidden_size :].detach().numpy()
        np.testing.assert_allclose(start, np.eye(config.hidden_size), atol=0.1)
        assert np.count_nonzero(start) == start.size
    assert torch.equal(heads[1].norm, target.tensors.final_norm)

"""EAGLE-1 heads, which EAGLE-2 drafts with as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.training.batch import Batch
from draftline.training.heads.chain_layer import ChainLayer
from draftline.training.heads.eagle import EagleHead, pass_last_feature
from draftline.training.heads.eagle3 import describe_eagle3
from draftline.training.heads.head import HeadLoss
from draftline.training.heads.rows import Rows, real_rows
from draftline.training.heads.target_tensors import TargetTensors


def describe_eagle1(target: CheckpointConfig) -> HeadConfig:
    """Describe a head of the target's sizes that borrows its embedding and lm_head."""
    config = describe_eagle3(target, (), target.vocab_size)
    return replace(config, method="eagle1", fc_bias=True, owns_lm_head=False)


class Eagle1Head(EagleHead):
    """EAGLE (arXiv 2401.15077): one layer over ``fc`` of [embedding, feature], whose output is the next feature.

    Source: section 3.2 and the reference code (``train/main.py``): ``regression_weight`` (1.0) times SmoothL1 between
    the output and the target's next feature, averaged over its columns, plus ``classification_weight`` (0.1) times the
    soft cross-entropy of the target's lm_head over both. Features are the target's final hidden rows. In training they
    carry uniform noise in ``[-feature_noise / 2, feature_noise / 2]``: the paper's U(-0.1, 0.1) is 0.2 (its code scales
    this by 512 / the text's length besides). The layer has no input norm, and no norm follows it.

    Drafts of depth 2 and more, which read the head's own output, are not trained, as published; they are counted.
    """

    def __init__(
        self,
        config: HeadConfig,
        target: TargetTensors,
        *,
        feature_noise: float,
        regression_weight: float,
        classification_weight: float,
    ) -> None:
        super().__init__(config, target)
        assert config.method == "eagle1"
        self.feature_noise = feature_noise
        self.regression_weight, self.classification_weight = regression_weight, classification_weight
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        pass_last_feature(self.fc)
        self.layer = ChainLayer(config, config.hidden_size)

    def losses(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        """Sum the loss of depth 1; ``num_depths`` beyond are for counting."""
        rows = real_rows(batch)
        chains = self.chains(rows, num_depths or 1)
        weights = [self.classification_weight, *[0.0] * (len(chains) - 1)]
        result = self.classify(rows, chains, self.target_lm_head, weights)
        chosen, hidden = chains[0]
        distances = functional.smooth_l1_loss(hidden, self._features(rows)[chosen + 1], reduction="none").mean(-1)
        return replace(result, loss=result.loss + self.regression_weight * distances.sum())

    def first_hidden(self, rows: Rows) -> Tensor:
        features = self._features(rows)
        if self.training:
            features = features + (torch.rand_like(features) - 0.5) * self.feature_noise
        return features

    def layer_inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([embedded, hidden], -1)).float()
        return x, x

    def tensors(self) -> dict[str, Tensor]:
        found = {"fc.weight": self.fc.weight}
        if self.head_config.fc_bias:
            found["fc.bias"] = self.fc.bias
        return {**found, **self.layer.tensors("layers.0")}

    def config(self) -> dict[str, Any]:
        return {"architectures": ["LlamaForCausalLM"], **self.shared_config(), "bias": self.head_config.fc_bias}

    def _features(self, rows: Rows) -> Tensor:
        return rows.features[:, -self.head_config.target_hidden_size :].float()

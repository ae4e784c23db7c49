"""EAGLE-3 heads with training-time test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.errors import CheckpointError
from draftline.training.batch import Batch
from draftline.training.heads.chain_layer import ChainLayer
from draftline.training.heads.eagle import EagleHead, pass_last_feature
from draftline.training.heads.head import HeadLoss, rms_norm
from draftline.training.heads.rows import Rows, real_rows
from draftline.training.heads.target_tensors import TargetTensors

MAX_FC_OUTPUT = 2.0**12  # float16 ends at 65504: sixteen times it is room for other texts and for what the layer adds
ROTARY_BASE = 10000.0  # what readers take where config.json has none; published heads do no better with the target's


def describe_eagle3(target: CheckpointConfig, captured_layers: tuple[int, ...], draft_vocab_size: int) -> HeadConfig:
    """Describe a head of the target's sizes: one layer of its width, heads and MLP."""
    return HeadConfig(
        method="eagle3",
        dtype="bfloat16",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=1,
        draft_vocab_size=draft_vocab_size,
        captured_layers=captured_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_size=target.head_size,
        intermediate_size=target.intermediate_size,
        norm_epsilon=target.norm_epsilon,
        rotary_base=ROTARY_BASE,
        max_position_embeddings=target.max_position_embeddings,
        owns_lm_head=True,
    )


class Eagle3Head(EagleHead):
    """EAGLE-3 (arXiv 2503.01840): ``fc`` of three features of the target, one layer over [embedding, feature], lm_head.

    Source, by the reference code (``traineagle3/cnets.py``) where the paper is silent:

    - section 3.1: features are outputs of low, middle and high layers, narrowed by ``fc``; no loss is on features;
    - section 3.2, training-time test: ``ttt_steps`` unrolled steps (the paper 5, the code 7); the output of a step,
      before the final norm, takes the feature's place in the next, whose token is the text's next one; attention and
      positions as in ``ChainLayer``;
    - the loss of step j is ``-sum(softmax(target logits of the draft's vocabulary) * log_softmax(logits))``, weighted
      by ``ttt_decay ** j`` (0.8), where the predicted token is of the answer and the target's choice in the vocabulary.
      The code averages over all positions of a step; here ``HeadLoss.num_positions`` divides the sum of all steps;
    - ``ttt_share`` below 1 is not of the paper: of the chains that go beyond their first step a random share does, and
      their losses there are divided by it, so that the expected gradient is the same;
    - ``lm_head`` and the final norm start as the target's and are trained; the embedding is the target's and is not;
      ``fc`` starts with the last captured layer's output, see ``pass_last_feature``.

    ``ttt_steps`` 1 trains on features of the target alone, as EAGLE-1 does: drafts of depth 2 and more then read
    features of a kind that was never trained on.

    Shapes: ``target_ids [C] int64`` the draft's vocabulary, ascending. Features are the outputs of ``captured_layers``,
    then the final hidden row.
    """

    target_columns: Tensor
    column_of: Tensor
    target_ids: Tensor

    def __init__(
        self,
        config: HeadConfig,
        target: TargetTensors,
        target_ids: NDArray[np.int64],
        *,
        ttt_steps: int,
        ttt_decay: float,
        ttt_share: float = 1.0,
    ) -> None:
        super().__init__(config, target)
        assert config.method == "eagle3"
        assert config.draft_vocab_size == len(target_ids)
        self.ttt_steps, self.ttt_decay, self.ttt_share = ttt_steps, ttt_decay, ttt_share
        ids = torch.from_numpy(np.asarray(target_ids, np.int64))
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.captured_layers) * config.target_hidden_size, hidden, bias=False)
        pass_last_feature(self.fc)
        self.layer = ChainLayer(config, 2 * hidden)
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(target.final_norm.clone())
        self.lm_head = nn.Parameter(target.lm_head[ids].clone())
        column_of = torch.full((config.vocab_size,), -1)
        column_of[ids] = torch.arange(len(ids))
        self.register_buffer("target_ids", ids, persistent=True)
        self.register_buffer("target_columns", target.lm_head[ids].clone(), persistent=False)
        self.register_buffer("column_of", column_of, persistent=False)

    def losses(self, batch: Batch, num_depths: int | None = None) -> HeadLoss:
        """Sum the losses of ``ttt_steps`` steps; ``num_depths`` more or fewer are for counting."""
        config = self.head_config
        width = (len(config.captured_layers) + 1) * config.target_hidden_size
        if batch.features.shape[-1] != width:
            rule = f"a row has features of {len(config.captured_layers)} layers and the final one, {width} numbers"
            raise CheckpointError("features", rule, batch.features.shape[-1], "capture the features of this head")
        rows = real_rows(batch)
        share = self.ttt_share if self.training else 1.0
        chains = self.chains(rows, num_depths or self.ttt_steps, share)
        normed = [(chosen, self.normed(hidden)) for chosen, hidden in chains]
        weights = [self.ttt_decay**step if step < self.ttt_steps else 0.0 for step in range(len(chains))]
        weights[1:] = [weight / share for weight in weights[1:]]
        return self.classify(rows, normed, self.lm_head, weights, self.target_columns, self.column_of)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return what ``lm_head`` reads of outputs ``[R, h]``."""
        return rms_norm(hidden, self.norm, self.head_config.norm_epsilon)

    def first_hidden(self, rows: Rows) -> Tensor:
        hidden: Tensor = self.fc(rows.features[:, : -self.head_config.target_hidden_size])
        return hidden.float()

    def layer_inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        epsilon = self.head_config.norm_epsilon
        normed = rms_norm(embedded, self.input_layernorm, epsilon), rms_norm(hidden, self.hidden_norm, epsilon)
        return hidden, torch.cat(normed, -1)

    def projections(self) -> list[nn.Parameter]:
        return [self.lm_head]

    def finish(self, features: Tensor) -> dict[str, float]:
        """Scale the residual stream by a power of two, so that ``fc`` of ``features`` ends at ``MAX_FC_OUTPUT``.

        Whatever reads the stream norms it first, so that drafts stay what they were but for the norms' epsilon. Targets
        have tokens of massive activations (arXiv 2402.17762), from which ``fc`` goes beyond float16 otherwise.
        """
        with torch.no_grad():
            largest = float(self.fc(features[:, : -self.head_config.target_hidden_size].float()).abs().max())
            scale = min(1.0, 2.0 ** math.floor(math.log2(MAX_FC_OUTPUT / largest))) if largest > 0 else 1.0
            for matrix in (self.fc.weight, self.layer.o_proj.weight, self.layer.down_proj.weight):
                matrix.mul_(scale)
        return {"stream_scale": scale}

    def tensors(self) -> dict[str, Tensor]:
        size = self.head_config.vocab_size
        return {
            "fc.weight": self.fc.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm,
            "midlayer.input_layernorm.weight": self.input_layernorm,
            **self.layer.tensors("midlayer"),
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
            "d2t": self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device),
            "t2d": torch.zeros(size, dtype=torch.bool, device=self.target_ids.device).index_fill(
                0, self.target_ids, True
            ),
        }

    def config(self) -> dict[str, Any]:
        head = self.head_config
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.shared_config(),
            "draft_vocab_size": head.draft_vocab_size,
            "target_hidden_size": head.target_hidden_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(head.captured_layers),
                "use_aux_hidden_state": True,
            },
        }

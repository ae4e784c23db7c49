"""What EAGLE-1 and EAGLE-3 heads share: chains of drafts from every row of the answers at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftline.checkpoints.draft_config import HeadConfig
from draftline.training.heads.chain_layer import ChainLayer
from draftline.training.heads.head import DraftHead, HeadLoss, compute_dtype
from draftline.training.heads.rows import Rows, draft_rows
from draftline.training.heads.soft_cross_entropy import soft_cross_entropy
from draftline.training.heads.target_choices import TargetChoices
from draftline.training.heads.target_tensors import TargetTensors


class EagleHead(DraftHead):
    """Row t reads the target's feature of token t, the embedding of token t + 1, and stands at position t."""

    weights_file = "model.safetensors"
    layer: ChainLayer

    def __init__(self, config: HeadConfig, target: TargetTensors) -> None:
        super().__init__(target)
        self.head_config = config

    def first_hidden(self, rows: Rows) -> Tensor:
        """Turn the target's features of all rows into what stands for the output of the row before, ``[N, h]``."""
        raise NotImplementedError

    def layer_inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and what attention reads, of rows of any depth."""
        raise NotImplementedError

    def chains(self, rows: Rows, num_depths: int, share: float = 1.0) -> list[tuple[Tensor, Tensor]]:
        """Draft behind every row: by depth, the rows where the chains start and the outputs ``[R, h]`` there.

        A random ``share`` of the chains goes deeper than one token.

        The tokens are the text's own (teacher forcing); from depth 2 on, the feature is the row's output before.
        """
        longest = max((end - start for start, end in itertools.pairwise(rows.starts)), default=0)
        self.layer.grow_rotary_tables(longest + num_depths, rows.token_ids.device)
        starts = draft_rows(rows, num_depths, share)
        # A text's last row has no next token; it is before no chain, so its keys are read by none.
        next_ids = torch.cat([rows.token_ids[1:], rows.token_ids[:1]])
        x, attention_input = self.layer_inputs(self.target_embedding[next_ids], self.first_hidden(rows))
        chains = self.layer.begin(attention_input, rows.positions, rows.starts, starts[0])
        hidden = self.layer.first(x[starts[0]], attention_input[starts[0]], rows.positions[starts[0]], chains)
        found = [(starts[0], hidden)]
        for step, chosen in enumerate(starts[1:], 1):
            kept = torch.searchsorted(chains.rows, chosen)
            chains.keep(kept, chosen)
            embedded = self.target_embedding[rows.token_ids[chosen + 1 + step]]
            x, attention_input = self.layer_inputs(embedded, hidden[kept])
            hidden = self.layer.next(x, attention_input, rows.positions[chosen] + step, chains)
            found.append((chosen, hidden))
        return found

    def classify(
        self,
        rows: Rows,
        chains: Sequence[tuple[Tensor, Tensor]],
        lm_head: Tensor,
        depth_weights: Sequence[float],
        columns: Tensor | None = None,
        column_of: Tensor | None = None,
    ) -> HeadLoss:
        """Sum the soft cross-entropy of every depth, times its weight, and count.

        The target's distribution for the token of depth d behind row t is that of its own row t + d.
        """
        dtype, first = compute_dtype(self.target_lm_head), chains[0][0]
        targets = TargetChoices(
            rows.features[first + 1, -self.target_config.hidden_size :],
            rows.token_ids[first + 2],
            self.target_lm_head,
            columns,
            column_of,
            dtype=dtype,
            is_exact=not self.training,
        )
        # Row t + d of depth d is row t + 1 of depth 1 for another t: the targets of all depths are among those.
        starts = [chosen for chosen, _ in chains]
        target_rows = [torch.searchsorted(first, chosen + step) for step, chosen in enumerate(starts)]
        hidden = [hidden for _, hidden in chains]
        result = soft_cross_entropy(hidden, lm_head, targets, target_rows, depth_weights, dtype)
        return count_chains(result.loss, result.is_counted[0], result.is_correct, starts)

    def shared_config(self) -> dict[str, Any]:
        """The keys that both layouts take from Llama's ``config.json``."""
        head, target = self.head_config, self.target_config
        config: dict[str, Any] = {
            "model_type": "llama",
            "vocab_size": head.vocab_size,
            "hidden_size": head.hidden_size,
            "intermediate_size": head.intermediate_size,
            "num_hidden_layers": head.num_layers,
            "num_attention_heads": head.num_attention_heads,
            "num_key_value_heads": head.num_key_value_heads,
            "head_dim": head.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": head.norm_epsilon,
            "rope_theta": head.rotary_base,
            "max_position_embeddings": head.max_position_embeddings,
            "attention_bias": head.qkv_bias,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        if head.rotary_scaling is not None:
            config["rope_scaling"] = head.rotary_scaling
        if target.eos_token_ids:
            config["eos_token_id"] = list(target.eos_token_ids)
        return config


def pass_last_feature(fc: nn.Linear) -> None:
    """Let ``fc`` start as the last of its inputs, a feature of the target, and a tenth of its random weights.

    The residual stream then starts where the target's own layers leave it, which ``lm_head`` can read; from random
    weights alone a short training first has to find that.
    """
    size = fc.out_features
    with torch.no_grad():
        fc.weight.mul_(0.1)
        fc.weight[:, -size:].add_(torch.eye(size))


def count_chains(
    loss: Tensor, is_counted: Tensor, is_correct: Sequence[Tensor], rows_by_depth: Sequence[Tensor]
) -> HeadLoss:
    """Count by depth; ``is_counted`` is of the rows of depth 1, ``is_correct`` of those of every depth."""
    num_correct, num_accepted, num_counted = [], [], []
    before = rows_by_depth[0]
    accepted = torch.ones_like(before, dtype=torch.bool)
    for rows, correct in zip(rows_by_depth, is_correct, strict=True):
        accepted = accepted[torch.searchsorted(before, rows)] & correct
        before = rows
        num_counted.append(torch.tensor(len(rows), device=correct.device))
        num_correct.append(correct.sum())
        num_accepted.append(accepted.sum())
    return HeadLoss(
        loss, is_counted.sum(), torch.stack(num_correct), torch.stack(num_accepted), torch.stack(num_counted)
    )

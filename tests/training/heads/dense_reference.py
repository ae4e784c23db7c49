"""Training-time test written out: every row of every step in one sequence of keys, under one dense mask; float64."""

from __future__ import annotations

import torch
from torch import Tensor

from draftline.training.batch import Batch
from draftline.training.heads import Eagle3Head


def dense_mask(num_rows: int, step: int) -> Tensor:
    """``[num_rows, (step + 1) * num_rows]``: causal over the rows of step 0, the diagonal over those of each other.

    >>> dense_mask(2, 1).int().tolist()
    [[1, 0, 1, 0], [1, 1, 0, 1]]
    """
    causal = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    return torch.cat([causal, *[torch.eye(num_rows, dtype=torch.bool)] * step], 1)


class DenseEagle3:
    """The head's weights in float64 as leaves, and the forward and the loss of one text after another."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        self.weights = {name: value.detach().double().requires_grad_() for name, value in head.named_parameters()}

    def outputs(self, token_ids: Tensor, features: Tensor, num_steps: int) -> list[Tensor]:
        """Outputs of every step ``[n, h]``; behind the end of the text its first tokens stand, of no meaning."""
        config, w = self.head.head_config, self.weights
        hidden = features[:, : -config.target_hidden_size].double() @ w["fc.weight"].T
        num_rows, heads, kv_heads = len(token_ids), config.num_attention_heads, config.num_key_value_heads
        keys, values, found = [], [], []
        for step in range(num_steps):
            embedded = self.head.target_embedding.double()[token_ids.roll(-1 - step)]
            both = torch.cat([self._norm(embedded, "input_layernorm"), self._norm(hidden, "hidden_norm")], -1)
            qkv = (both @ w["layer.qkv_proj.weight"].T).view(num_rows, -1, config.head_size)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
            positions = torch.arange(num_rows) + step
            q, k = self._rotate(q, positions), self._rotate(k, positions)
            keys.append(k.repeat_interleave(heads // kv_heads, 1))
            values.append(v.repeat_interleave(heads // kv_heads, 1))
            scores = torch.einsum("thd,shd->hts", q, torch.cat(keys)) * config.head_size**-0.5
            scores = scores.masked_fill(~dense_mask(num_rows, step), -torch.inf)
            attended = torch.einsum("hts,shd->thd", torch.softmax(scores, -1), torch.cat(values)).flatten(1)
            hidden = hidden + attended @ w["layer.o_proj.weight"].T
            normed = self._norm(hidden, "layer.post_attention_layernorm")
            gate, up = (normed @ w["layer.gate_up_proj.weight"].T).chunk(2, -1)
            hidden = hidden + (torch.nn.functional.silu(gate) * up) @ w["layer.down_proj.weight"].T
            found.append(hidden)
        return found

    def loss(self, batch: Batch) -> tuple[Tensor, int, list[list[int]]]:
        """The sum of losses, the positions of depth 1 that count, and by depth [correct, accepted, counted]."""
        total, num_positions, counts = torch.zeros(()).double(), 0, [[0, 0, 0] for _ in range(self.head.ttt_steps)]
        lm_head, ids = self.head.target_lm_head.double(), self.head.target_ids
        for text in range(len(batch.token_ids)):
            length = int(batch.is_real[text].sum())
            tokens, answers = batch.token_ids[text, :length], batch.is_answer[text, :length]
            features = batch.features[text, :length]
            target_logits = features[:, -lm_head.shape[1] :].double() @ lm_head.T
            by_step = [
                torch.log_softmax(self._norm(hidden, "norm") @ self.weights["lm_head"].T, -1)
                for hidden in self.outputs(tokens, features, self.head.ttt_steps)
            ]
            for row in range(length):
                accepted = True
                for step, log_probs in enumerate(by_step):
                    if row + 2 + step >= length or not answers[row + 2 + step]:
                        break
                    logits = target_logits[row + 1 + step]
                    is_inside = bool((ids == logits.argmax()).any())
                    is_correct = int(ids[log_probs[row].argmax()]) == int(logits.argmax())
                    accepted = accepted and is_correct
                    counts[step] = [a + b for a, b in zip(counts[step], (is_correct, accepted, 1), strict=True)]
                    if is_inside:
                        num_positions += step == 0
                        cross_entropy = -(torch.softmax(logits[ids], -1) * log_probs[row]).sum()
                        total = total + self.head.ttt_decay**step * cross_entropy
        return total, num_positions, counts

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.head.head_config.norm_epsilon).sqrt() * self.weights[name]

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        config, size = self.head.head_config, self.head.head_config.head_size
        angles = positions[:, None] * config.rotary_base ** -(torch.arange(0, size, 2).double() / size)
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous()) * torch.exp(1j * angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

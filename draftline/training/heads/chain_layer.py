"""The one transformer layer of an EAGLE head, over chains of drafts that start at many rows of a text at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from draftline.checkpoints.draft_config import HeadConfig
from draftline.graphs.rotary import build_rotary_tables
from draftline.training.heads.head import rms_norm


@dataclass
class Chains:
    """Keys and values: of all rows of the texts, fed with the target's features, and of the chains' later rows."""

    starts: list[int]
    keys: Tensor  # [N, K, D]
    values: Tensor
    rows: Tensor  # [R] the row of the text at which each chain starts, ascending
    own_keys: list[Tensor] = field(default_factory=list)  # of depth 2, 3, ...: [R, K, D]
    own_values: list[Tensor] = field(default_factory=list)

    def keep(self, kept: Tensor, rows: Tensor) -> None:
        """Go on with the chains ``kept``, which start at ``rows``."""
        self.rows = rows
        self.own_keys = [keys[kept] for keys in self.own_keys]
        self.own_values = [values[kept] for values in self.own_values]


class ChainLayer(nn.Module):
    """Attention over inputs of ``attention_size`` and the MLP, each added to the residual stream.

    Source: EAGLE-3 (arXiv 2503.01840), section 3.2 and its reference code (``cache_hidden``): in training-time test a
    row of step j >= 1 attends to the rows of step 0 up to its chain's first one, and to its own chain's rows of steps
    1 .. j, each one more logit. This is what the chain sees when it is drafted: the text before its root was fed with
    the target's features, and the other chains do not exist. Positions grow by one with each step.
    """

    def __init__(self, config: HeadConfig, attention_size: int) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_size
        self.qkv_proj = nn.Linear(attention_size, (heads + 2 * kv_heads) * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.post_attention_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        # No buffers: processes that train together have texts of different lengths.
        self._rotary_tables = torch.empty(0, size // 2), torch.empty(0, size // 2)

    def grow_rotary_tables(self, num_positions: int, device: torch.device) -> None:
        config, present = self.config, self._rotary_tables[0]
        if num_positions > len(present) or present.device != device:
            cosines, sines = build_rotary_tables(
                config.head_size,
                config.rotary_base,
                config.rotary_scaling,
                config.max_position_embeddings,
                2 * num_positions,
            )
            self._rotary_tables = torch.from_numpy(cosines).to(device), torch.from_numpy(sines).to(device)

    def begin(self, attention_input: Tensor, positions: Tensor, starts: list[int], rows: Tensor) -> Chains:
        """Compute keys and values of all rows ``[N, attention_size]``; chains start at ``rows``."""
        first = self.config.num_attention_heads * self.config.head_size
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[first:]
        kv = functional.linear(attention_input, self.qkv_proj.weight[first:], bias)
        keys, values = self._heads(kv).chunk(2, 1)
        return Chains(starts, self._rotate(keys, positions), values, rows)

    def first(self, x: Tensor, attention_input: Tensor, positions: Tensor, chains: Chains) -> Tensor:
        """Run the chains' first rows: ``x [R, hidden_size]``, the residual stream, to the same after the layer."""
        size = self.config.num_attention_heads * self.config.head_size
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[:size]
        q = self._heads(functional.linear(attention_input, self.qkv_proj.weight[:size], bias))
        return self._finish(x, self._attend(self._rotate(q, positions), chains))

    def next(self, x: Tensor, attention_input: Tensor, positions: Tensor, chains: Chains) -> Tensor:
        """Run one more row of each chain."""
        kv_heads = self.config.num_key_value_heads
        heads = self._heads(self.qkv_proj(attention_input))
        q, k, v = torch.split(heads, [self.config.num_attention_heads, kv_heads, kv_heads], 1)
        chains.own_keys.append(self._rotate(k, positions))
        chains.own_values.append(v)
        return self._finish(x, self._attend(self._rotate(q, positions), chains))

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the layer's weights by their published names."""
        config = self.config
        sizes = [heads * config.head_size for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        found: dict[str, Tensor] = {}
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = torch.split(getattr(self.qkv_proj, kind), sizes)
            found |= {f"{prefix}.self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
        found[f"{prefix}.self_attn.o_proj.weight"] = self.o_proj.weight
        gate, up = self.gate_up_proj.weight.chunk(2)
        found |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        found[f"{prefix}.mlp.down_proj.weight"] = self.down_proj.weight
        found[f"{prefix}.post_attention_layernorm.weight"] = self.post_attention_layernorm
        return found

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), x.shape[1] // self.config.head_size, self.config.head_size)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``[R, heads, D]`` in float32, in the half-split convention."""
        cosines, sines = (table[positions, None] for table in self._rotary_tables)
        left, right = x.float().chunk(2, -1)
        rotated = torch.cat([left * cosines - right * sines, right * cosines + left * sines], -1)
        return rotated.to(x.dtype)

    def _attend(self, q: Tensor, chains: Chains) -> Tensor:
        """Return ``[R, heads * D]``; softmax in float32."""
        kv_heads, size = self.config.num_key_value_heads, self.config.head_size
        q = q.reshape(len(q), kv_heads, q.shape[1] // kv_heads, size) * size**-0.5  # [R, K, G, D]
        own = None
        if chains.own_keys:
            own = torch.stack([(q * keys[:, :, None]).sum(-1) for keys in chains.own_keys], -1)  # [R, K, G, j]
        device = chains.rows.device
        bounds = torch.searchsorted(chains.rows, torch.tensor(chains.starts, device=device)).tolist()
        outputs = []
        for text, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first == last:
                continue
            start, end = chains.starts[text], chains.starts[text + 1]
            keys, values = (x[start:end].transpose(0, 1) for x in (chains.keys, chains.values))  # [K, n, D]
            visible = torch.arange(start, end, device=device) <= chains.rows[first:last, None]  # [r, n]
            queries = q[first:last].permute(1, 2, 0, 3)  # [K, G, r, D]
            scores = (queries.flatten(1, 2) @ keys.transpose(1, 2)).float()
            scores = scores.view(*queries.shape[:3], end - start).masked_fill(~visible, -torch.inf)
            if own is not None:
                scores = torch.cat([scores, own[first:last].permute(1, 2, 0, 3).float()], -1)
            weights = torch.softmax(scores, -1).to(values.dtype)
            of_text, of_chain = weights[..., : end - start], weights[..., end - start :]
            attended = (of_text.flatten(1, 2) @ values).view(queries.shape).permute(2, 0, 1, 3)
            for step, own_values in enumerate(chains.own_values):
                weight = of_chain[..., step].permute(2, 0, 1)[..., None]
                attended = attended + weight * own_values[first:last, :, None]
            outputs.append(attended.flatten(1))
        return torch.cat(outputs) if outputs else q.flatten(1)  # no chain at all

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.o_proj(attended)
        normed = rms_norm(x, self.post_attention_layernorm, self.config.norm_epsilon)
        gate, up = self.gate_up_proj(normed).chunk(2, -1)
        y: Tensor = x + self.down_proj(functional.silu(gate) * up)
        return y

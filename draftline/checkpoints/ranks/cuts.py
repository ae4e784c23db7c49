"""How tensor parallelism divides each tensor, as one table.

Source: ``convert_hf_llama``, ``load_medusa_hf`` and ``load_eagle_hf`` of TensorRT-LLM's converters. A rank's slice is
described by *bands*, so that splitting and merging read the same description: a band is a run of rows of the whole
tensor, and where on which rank it lies. Vectors are matrices of one column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["whole", "rows", "columns", "heads", "vocabulary"]

# What follows the name of a tensor's owner -> how it is divided. `heads` are rows of q, k and v, each divided by
# itself; `vocabulary` are rows, filled up with zeros until they divide.
CUTS: dict[str, Kind] = {
    "vocab_embedding.weight": "whole",
    "input_layernorm.weight": "whole",
    "attention.qkv.weight": "heads",
    "attention.qkv.bias": "heads",
    "attention.q_layernorm.weight": "whole",
    "attention.k_layernorm.weight": "whole",
    "attention.dense.weight": "columns",
    "attention.dense.bias": "whole",
    "post_layernorm.weight": "whole",
    "mlp.fc.weight": "rows",
    "mlp.fc.bias": "rows",
    "mlp.gate.weight": "rows",
    "mlp.gate.bias": "rows",
    "mlp.proj.weight": "columns",
    "mlp.proj.bias": "whole",
    "ln_f.weight": "whole",
    "lm_head.weight": "vocabulary",
    "fc.weight": "rows",  # of an EAGLE network
    "fc.bias": "rows",
    "linear.weight": "rows",  # of a residual block of a Medusa head
    "linear.bias": "rows",
}
_OWNER = re.compile(
    r"(?:transformer\.(?:layers\.\d+\.)?"
    r"|eagle_nets\.\d+\.(?:drafter\.(?:layers\.\d+\.)?)?"
    r"|medusa_heads\.\d+\.(?:medusa_layers\.\d+\.)?)?"
)


@dataclass(frozen=True)
class Heads:
    """The attention heads of the network that a tensor belongs to."""

    num_attention_heads: int
    num_key_value_heads: int
    head_size: int


@dataclass(frozen=True)
class Band:
    """Rows ``start .. stop - 1`` of the whole, or ``columns`` of them, lie from row ``at`` on at ``place``."""

    place: int
    start: int
    stop: int
    at: int
    columns: slice


@dataclass(frozen=True)
class Slice:
    """A rank's part of a tensor: its shape, the same at every place, and the bands of all places in order of rows."""

    shape: tuple[int, ...]
    bands: tuple[Band, ...]


def cut_kind(key: str) -> Kind:
    """Return how the tensor ``key`` is divided.

    >>> cut_kind("transformer.layers.11.mlp.proj.weight"), cut_kind("eagle_nets.0.drafter.fc.bias")
    ('columns', 'rows')
    """
    owner = _OWNER.match(key)
    assert owner is not None
    return CUTS[key[owner.end() :]]


def cut(key: str, shape: Sequence[int], tp_size: int, heads: Heads) -> Slice:
    """Divide a tensor among ``tp_size`` ranks; ``heads`` are those of its network.

    Key and value heads fewer than ranks are repeated: ranks side by side hold the same one. That the sizes divide is
    checked before (``check_divides``).

    >>> cut("lm_head.weight", (5, 2), 2, Heads(2, 1, 4)).shape
    (3, 2)
    """
    kind, rows = cut_kind(key), shape[0]
    everything = slice(None)
    if kind == "whole":
        return Slice(tuple(shape), tuple(Band(place, 0, rows, 0, everything) for place in range(tp_size)))
    if kind == "columns":
        width = shape[1] // tp_size
        parts = (slice(place * width, (place + 1) * width) for place in range(tp_size))
        return Slice((rows, width), tuple(Band(place, 0, rows, 0, part) for place, part in enumerate(parts)))
    if kind == "heads":
        q, kv = heads.num_attention_heads * heads.head_size, heads.num_key_value_heads * heads.head_size
        key_or_value = (kv, max(kv // tp_size, heads.head_size))
        sections = [(q, q // tp_size), key_or_value, key_or_value]
    else:
        sections = [(rows, -(-rows // tp_size))]
    bands, first, at = [], 0, 0
    for num_rows, local_rows in sections:
        for place in range(tp_size):
            start = place * local_rows
            if kind == "heads":  # ranks that share a head lie side by side
                start = place * num_rows // tp_size // local_rows * local_rows
            stop = min(start + local_rows, num_rows)
            if start < stop:
                bands.append(Band(place, first + start, first + stop, at, everything))
        first, at = first + num_rows, at + local_rows
    return Slice((at, *shape[1:]), tuple(bands))

"""The rotary tables of an engine: tensors that are computed, not read."""

from __future__ import annotations

import functools

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.safetensors_file import TensorEntry
from draftline.graphs.decoder import LOCAL_ROTARY, ROTARY
from draftline.graphs.rotary import build_rotary_tables


def rotary_entries(layers: CheckpointConfig, max_seq_len: int, num_positions: int) -> tuple[TensorEntry, ...]:
    """Describe the rotary tables of a network: of ``num_positions``, in an engine for texts of ``max_seq_len``."""
    known = layers.max_position_embeddings
    tables = dict(
        zip(
            ROTARY,
            build_rotary_tables(
                layers.rotary_size, layers.rotary_base, layers.rotary_scaling, known, num_positions, max_seq_len
            ),
            strict=True,
        )
    )
    if layers.local_rotary_base is not None:
        local = build_rotary_tables(layers.rotary_size, layers.local_rotary_base, None, known, num_positions)
        tables |= dict(zip(LOCAL_ROTARY, local, strict=True))
    return tuple(
        TensorEntry(name, "float32", table.shape, functools.partial(lambda values: [values], table))
        for name, table in tables.items()
    )

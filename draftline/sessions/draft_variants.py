"""The same drafter with other rotary tables: to measure which a head was trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from draftline.checkpoints.draft_config import HeadConfig
from draftline.graphs.eagle import head_layers
from draftline.sessions.engine_config import EngineConfig, draft_model_file
from draftline.sessions.rotary_weights import rotary_entries


def add_rotary_variants(
    engine: Path, config: EngineConfig, heads: list[HeadConfig], num_positions: int
) -> EngineConfig:
    """Write graphs of the engine's only drafter beside its own, with the rotary settings of ``heads``.

    All weights are those of the drafter, where they lie. Returns a configuration in which drafter I + 1 is that of
    ``heads[I]``; it is not written.
    """
    (draft,) = config.drafts
    for index, head in enumerate(heads, 1):
        model = onnx.load(engine / draft_model_file(0), load_external_data=False)
        entries = rotary_entries(head_layers(head), config.max_seq_len, num_positions)
        named = {entry.name: entry for entry in entries}
        for tensor in model.graph.initializer:
            if tensor.name in named:
                (table,) = named.pop(tensor.name).chunks()
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(table), tensor.name))
        assert not named, "heads turn queries and keys"
        onnx.save(model, engine / draft_model_file(index))
    return replace(config, drafts=(draft,) * (1 + len(heads)))

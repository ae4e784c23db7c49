"""The tensors of the target that heads read or start from: its embedding, its final norm and its lm_head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.checkpoints.trtllm import WEIGHTS_FILE, load_checkpoint_config
from draftline.errors import CheckpointError
from draftline.graphs.target import EMBEDDING, FINAL_NORM, lm_head_name


@dataclass(frozen=True)
class TargetTensors:
    """``embedding`` and ``lm_head [V, h]``, one tensor where the target shares them; ``final_norm [h]``; in float32.
    ``name`` is for people."""

    config: CheckpointConfig
    embedding: Tensor
    lm_head: Tensor
    final_norm: Tensor
    name: str


def load_target_tensors(directory: Path, name: str) -> TargetTensors:
    """Load them from the converted checkpoint in ``directory``.

    Raises:
        CheckpointError: the folder is no converted checkpoint, or lacks a tensor.
    """
    config, path = load_checkpoint_config(directory), directory / WEIGHTS_FILE
    locations = tensor_locations(path)

    def load(key: str, *shape: int) -> Tensor:
        if key not in locations or locations[key].shape != shape:
            rule = f"the target has a tensor {key} of {' x '.join(map(str, shape))}"
            got = locations[key].shape if key in locations else "no such tensor"
            raise CheckpointError(path, rule, got, "convert the checkpoint again")
        return torch.from_numpy(map_tensor(path, locations[key]).astype(np.float32))

    size = config.hidden_size
    embedding = load(f"{EMBEDDING}.weight", config.vocab_size, size)
    is_shared = config.share_embedding_table
    lm_head = embedding if is_shared else load(f"{lm_head_name(config)}.weight", config.vocab_size, size)
    return TargetTensors(config, embedding, lm_head, load(FINAL_NORM, size), name)

"""Write trained heads in the published layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.checkpoints.converted import replace_directory
from draftline.checkpoints.disk_space import disk_full_named
from draftline.checkpoints.dtypes import numpy_dtype
from draftline.checkpoints.safetensors_file import TensorEntry, write_safetensors
from draftline.errors import CheckpointError
from draftline.training.examples import Examples
from draftline.training.heads.head import DraftHead

FINISHING_ROWS = 65536
CONFIG_FILE, PROVENANCE_FILE = "config.json", "provenance.json"


def finish_head(head: DraftHead, examples: Examples) -> dict[str, float]:
    """Make a trained head ready to be exported, by the first rows of its data; return numbers worth telling."""
    features = torch.from_numpy(np.array(examples.features[:FINISHING_ROWS]))
    return head.finish(features.to(head.target_embedding.device))


def export_draft(head: DraftHead, directory: Path, provenance: Mapping[str, Any]) -> None:
    """Write ``head``: its tensors in bfloat16, ``config.json``, and ``provenance`` as ``provenance.json``.

    The folder appears, or takes the place of a draft that was exported before, when it is whole.

    Raises:
        CheckpointError: a tensor is not finite, the disk is full, or ``directory`` holds something else.
    """
    is_ours = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_ours and not ((directory / PROVENANCE_FILE).is_file() and (directory / CONFIG_FILE).is_file()):
        rule = "the folder of a trained draft is new, empty or a draft exported before"
        raise CheckpointError(directory, rule, "something else", "choose another folder")
    arrays = {name: _to_numpy(name, tensor) for name, tensor in head.tensors().items()}
    num_bytes = sum(array.nbytes for array in arrays.values())
    with replace_directory(directory) as partial, disk_full_named(directory, num_bytes):
        # d2t first: its elements are the widest, so all tensors start at a multiple of their element size.
        ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
        entries = [_entry(name, array) for name, array in ordered]
        write_safetensors(partial / head.weights_file, entries, {"format": "pt"})
        for name, value in ((CONFIG_FILE, head.config()), (PROVENANCE_FILE, dict(provenance))):
            (partial / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _entry(name: str, array: NDArray[Any]) -> TensorEntry:
    return TensorEntry(name, array.dtype.name, array.shape, lambda: [array])


def _to_numpy(name: str, tensor: Tensor) -> NDArray[Any]:
    values = tensor.detach().cpu().contiguous()
    if not values.is_floating_point():
        array: NDArray[Any] = values.numpy()
        return array
    rounded = values.to(torch.bfloat16)  # to nearest even
    if not bool(torch.isfinite(rounded).all()):
        cure = "train again with a lower learning rate"
        raise CheckpointError("trained head", f"tensor {name} is finite in bfloat16", "NaN or infinity", cure)
    return rounded.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))

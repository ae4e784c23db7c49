"""The vocabulary of an EAGLE-3 head: a subset of the target's, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

_CURE = "fetch or train the head again"


def read_vocabulary_offsets(
    tensors: Mapping[str, SourceTensor], config: HeadConfig, where: Path
) -> NDArray[np.int64] | None:
    """Read and check ``d2t`` and, where it is there, ``t2d``, which says the same from the target's side.

    Shapes: ``d2t [draft_vocab_size] int64``: target id = draft id + d2t[draft id]. ``t2d [vocab_size] bool``: whether a
    target id is in the draft's vocabulary. Returns ``d2t``, or None where the head has the target's vocabulary, which
    needs neither.

    Raises:
        CheckpointError: ``d2t`` is missing, a tensor has another shape or dtype, target ids do not increase or are not
            below ``vocab_size``, or the two disagree.
    """
    is_whole = config.draft_vocab_size == config.vocab_size
    if "d2t" not in tensors and not is_whole:
        rule = f"a head of {config.draft_vocab_size} of the target's {config.vocab_size} tokens has d2t"
        raise CheckpointError(where, rule, "no such tensor", "fetch the whole checkpoint")
    if "d2t" in tensors:
        offsets = _read(tensors["d2t"], "d2t", "int64", config.draft_vocab_size)
    else:
        offsets = np.zeros(config.draft_vocab_size, np.int64)
    target_ids = np.arange(len(offsets)) + offsets
    if not (target_ids[0] >= 0 and target_ids[-1] < config.vocab_size and (np.diff(target_ids) > 0).all()):
        rule = f"draft id + d2t[draft id] are increasing target ids, below {config.vocab_size}"
        wrong = np.flatnonzero(np.diff(target_ids, prepend=-1) <= 0)
        draft_id = int(wrong[0]) if wrong.size else int(np.argmax(target_ids >= config.vocab_size))
        got, cure = f"target id {target_ids[draft_id]} for draft id {draft_id}", _CURE
        if (np.diff(offsets, prepend=-1) > 0).all() and offsets[-1] < config.vocab_size:
            cure = "store d2t[draft id] - draft id: these are target ids themselves, not offsets"
        raise CheckpointError(tensors["d2t"].where, rule, got, cure)
    if "t2d" in tensors:
        members = np.flatnonzero(_read(tensors["t2d"], "t2d", "bool", config.vocab_size))
        if not np.array_equal(members, target_ids):
            differing = np.setxor1d(members, target_ids)
            got = f"{len(differing)} target ids that differ, the first {differing[0]}"
            raise CheckpointError(tensors["t2d"].where, "t2d is true for the target ids of d2t", got, _CURE)
    return None if is_whole else offsets


def _read(tensor: SourceTensor, name: str, dtype: str, size: int) -> NDArray[Any]:
    if tensor.dtype != dtype or tensor.shape != (size,):
        got = f"{tensor.dtype} of shape {list(tensor.shape)}"
        raise CheckpointError(tensor.where, f"tensor {name} is {dtype} of shape {[size]}", got, _CURE)
    return np.concatenate([chunk.copy() for chunk in tensor.chunks()])

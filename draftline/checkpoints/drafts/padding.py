"""Rows of a head's vocabulary behind the target's last token: padding, as tools that divide matrices leave it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

_CURE = "choose the head that was trained for this target"


def without_padding(
    tensors: Mapping[str, SourceTensor], names: Collection[str], num_stored: int, num_rows: int
) -> dict[str, SourceTensor]:
    """Return ``tensors``, of which those that ``names`` names keep the first ``num_rows`` of ``num_stored`` rows.

    Padding is recognised by its zeros: no token has such a row. Raises: CheckpointError for another number of rows;
    ``chunks`` of a tensor raise it where a row behind the last has another number.
    """
    cut = {name: tensors[name] for name in names if name in tensors}
    for name, tensor in cut.items():
        if tensor.shape[:1] != (num_stored,):
            rule = f"tensor {name} has shape {[num_stored, *tensor.shape[1:]]}, as config.json has vocab_size"
            raise CheckpointError(tensor.where, rule, list(tensor.shape), _CURE)
        chunks = partial(_first_rows, name, tensor, num_rows)
        cut[name] = replace(tensor, shape=(num_rows, *tensor.shape[1:]), chunks=chunks)
    return {**tensors, **cut}


def _first_rows(name: str, tensor: SourceTensor, num_rows: int) -> Iterator[NDArray[Any]]:
    left = num_rows * math.prod(tensor.shape[1:])
    for chunk in tensor.chunks():
        if left:
            yield chunk[:left]
        if chunk[left:].any():
            rule = f"rows behind the target's {num_rows} tokens are padding, all zeros"
            raise CheckpointError(tensor.where, rule, f"other numbers in {name}", _CURE)
        left = max(left - len(chunk), 0)

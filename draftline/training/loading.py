"""Batches for the heads, cut out of the mapped examples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from draftline.training.batch import Batch
from draftline.training.examples import Examples


def load_batch(examples: Examples, sequences: NDArray[np.int64], device: torch.device) -> Batch:
    """Return the sequences of these numbers, padded behind to the longest with zeros."""
    starts, ends = examples.sequence_starts[sequences], examples.sequence_starts[sequences + 1]
    shape = (len(sequences), int((ends - starts).max()))
    token_ids, is_answer = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    is_real = torch.zeros(shape, dtype=torch.bool)
    features = torch.zeros((*shape, examples.features.shape[1]), dtype=torch.float32)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        length = end - start
        token_ids[row, :length] = torch.from_numpy(examples.token_ids[start:end].astype(np.int64))
        is_answer[row, :length] = torch.from_numpy(np.array(examples.is_answer[start:end]))
        is_real[row, :length] = True
        features[row, :length] = torch.from_numpy(np.array(examples.features[start:end]))
    return Batch(*(tensor.to(device) for tensor in (token_ids, is_answer, is_real, features)))

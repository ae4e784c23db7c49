"""The trees that one step drafts, one per sequence, as padded arrays: what drafters propose and the target verifies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class DraftTrees:
    """B trees of at most N nodes.

    Shapes: all ``[B, N]``, rows padded behind ``num_nodes[b]`` nodes; ``num_nodes [B] int64``, the root included.

    - ``parents int32``: as in ``draftline.tree``, root and padding -1.
    - ``token_ids int32``: of the root, the sequence's last token; padding -1. Siblings have different tokens.
    - ``log_probs float32``: log of the draft's probability of a node given its parent; 0 at the root, -inf in padding.
    - ``sources int8``: which drafter proposed the node, an index into the pipeline's drafts; -1 at root and padding.
    """

    parents: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    sources: NDArray[np.int8]
    num_nodes: NDArray[np.int64]

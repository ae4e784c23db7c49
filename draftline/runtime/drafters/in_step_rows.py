"""The rows that a drafter ran for the nodes of growing trees, and which of them each may attend to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BIT = np.uint32(1)


class InStepRows:
    """Rows of B sequences in the order they were run, parents before children, with their packed masks.

    A node is a column of the pool of ``TreeGrowth``; ``row_ids_of [B, pool]`` gives its row, -1 = it has none.
    """

    def __init__(self, root_row_ids: NDArray[np.int64], pool_size: int, *, has_root: bool) -> None:
        """``root_row_ids [B]``: the rows behind which depth 1 stands; with ``has_root`` they are in-step rows."""
        num_sequences = len(root_row_ids)
        self.row_ids_of = np.full((num_sequences, pool_size), -1, dtype=np.int64)
        self.row_ids_of[:, 0] = root_row_ids
        self._masks_of = np.zeros((num_sequences, pool_size, -(-(pool_size + 1) // 32)), dtype=np.uint32)
        self._row_ids = np.zeros((num_sequences, pool_size), dtype=np.int32)
        self._masks = np.zeros_like(self._masks_of)
        self._num_rows = np.full(num_sequences, int(has_root), dtype=np.int64)
        if has_root:
            self._row_ids[:, 0] = root_row_ids
            self._masks[:, 0, 0] = self._masks_of[:, 0, 0] = 1

    def append(
        self,
        owners: NDArray[np.int64],
        ranks: NDArray[np.int64],
        nodes: NDArray[np.int64],
        parents: NDArray[np.int64],
        first_row_id: int,
    ) -> None:
        """Add nodes ``[n]`` of sequences ``owners``, the ``ranks``-th new one of its sequence each (0, 1, ...)."""
        places, numbers = self._num_rows[owners] + ranks, np.arange(len(nodes))
        masks = self._masks_of[owners, parents]
        masks[numbers, places >> 5] |= np.left_shift(_BIT, (places & 31).astype(np.uint32))
        row_ids = first_row_id + numbers
        self.row_ids_of[owners, nodes] = self._row_ids[owners, places] = row_ids
        self._masks_of[owners, nodes] = self._masks[owners, places] = masks
        self._num_rows += np.bincount(owners, minlength=len(self._num_rows))

    def pack(self, takes_part: NDArray[np.bool_]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return ``sequence_starts``, ``row_ids [T]`` and ``packed_mask [T, W]`` of some of the sequences."""
        counts = self._num_rows[takes_part]
        starts = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        width = int(counts.max())
        num_words = -(-width // 32)
        row_ids, masks = self._row_ids[takes_part, :width], self._masks[takes_part, :width, :num_words].view(np.int32)
        if starts[-1] == row_ids.size:  # nothing to leave out: every sequence has as many rows
            return starts, row_ids.ravel(), masks.reshape(-1, num_words)
        is_row = np.arange(width) < counts[:, None]
        return starts, row_ids[is_row], masks[is_row]

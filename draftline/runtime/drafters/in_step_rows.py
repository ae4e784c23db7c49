"""The rows that a drafter ran for the nodes of growing trees, and which of them each may attend to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BITS = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))


class InStepRows:
    """Rows of B sequences, as many of each, in the order they were run, with their packed masks.

    A node is a column of the pool of ``TreeGrowth``. Every depth runs a row for each place of the frontier; where that
    is padding (-1), the row stands for nothing and hangs below the root, so that all sequences keep the same shape.
    """

    def __init__(self, root_row_ids: NDArray[np.int64], pool_size: int, *, has_root: bool) -> None:
        """``root_row_ids [B]``: the rows behind which depth 1 stands; with ``has_root`` they are in-step rows."""
        num_sequences = len(root_row_ids)
        self._sequences = np.arange(num_sequences)[:, None]
        # One column more than the pool has, the last: padding reads and writes there.
        self._row_ids_of = np.full((num_sequences, pool_size + 1), -1, dtype=np.int64)
        self._masks_of = np.zeros((num_sequences, pool_size + 1, -(-(pool_size + 1) // 32)), dtype=np.uint32)
        self._row_ids_of[:, 0] = root_row_ids
        if has_root:
            self._masks_of[:, 0, 0] = 1
        self._row_ids = [self._row_ids_of[:, :1]] if has_root else []
        self._masks = [self._masks_of[:, :1].copy()] if has_root else []
        self._num_rows = int(has_root)  # of each sequence

    def append(self, nodes: NDArray[np.int64], parents: NDArray[np.int64], first_row_id: int) -> NDArray[np.int64]:
        """Add the nodes ``[B, F]`` of a depth, padded with -1; ids go on by sequence. Return their parents' row ids.

        ``parents [B, F]``: what stands beside padding is ignored.
        """
        parents = np.where(nodes >= 0, parents, 0)
        masks = self._masks_of[self._sequences, parents]
        for place in range(nodes.shape[1]):
            word, bit = divmod(self._num_rows + place, 32)
            masks[:, place, word] |= _BITS[bit]
        row_ids = np.arange(first_row_id, first_row_id + nodes.size).reshape(nodes.shape)
        parent_row_ids: NDArray[np.int64] = self._row_ids_of[self._sequences, parents]
        self._row_ids_of[self._sequences, nodes] = row_ids
        self._masks_of[self._sequences, nodes] = masks
        self._row_ids.append(row_ids)
        self._masks.append(masks)
        self._num_rows += nodes.shape[1]
        return parent_row_ids

    def pack(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return ``sequence_starts``, ``row_ids [T]`` and ``packed_mask [T, W]`` of all rows."""
        num_words = -(-self._num_rows // 32)
        starts = np.arange(len(self._sequences) + 1, dtype=np.int32) * np.int32(self._num_rows)
        row_ids = np.concatenate(self._row_ids, axis=1).ravel().astype(np.int32)
        masks = np.concatenate(self._masks, axis=1)[..., :num_words]
        return starts, row_ids, masks.reshape(-1, num_words).view(np.int32)

"""The rows that a drafter ran for the nodes of growing trees, and which of them each may attend to."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


class InStepRows:
    """Rows of B sequences, as many of each, in the order they were run, with their packed masks.

    Every depth adds a row for each place of the frontier, those included that are padding in a sequence.
    """

    def __init__(self, root_row_ids: NDArray[np.int64], max_rows: int, *, has_root: bool) -> None:
        """``root_row_ids [B]``: the rows behind which depth 1 stands; with ``has_root`` they are in-step rows.

        ``max_rows`` bounds the rows of a sequence that ``append`` will add.
        """
        self._sequences = np.arange(len(root_row_ids))[:, None]
        self._num_words = -(-(max_rows + has_root) // 32)
        self._num_rows = int(has_root)  # of each sequence
        self._frontier_ids = root_row_ids[:, None]
        self._frontier_masks = np.zeros((len(root_row_ids), 1, self._num_words), dtype=np.uint32)
        self._frontier_masks[:, 0, :1] = int(has_root)
        self._row_ids = [self._frontier_ids] if has_root else []
        self._masks = [self._frontier_masks] if has_root else []

    def append(self, parent_places: NDArray[np.int64], first_row_id: int) -> NDArray[np.int64]:
        """Add the rows ``[B, F]`` of a depth, whose parents have these places in the depth before.

        Ids go on by sequence. Returns the row ids of the parents, ``[B, F]``.
        """
        parent_row_ids: NDArray[np.int64] = self._frontier_ids[self._sequences, parent_places]
        num_new = parent_places.shape[1]
        self._frontier_masks = self._frontier_masks[self._sequences, parent_places]
        self._frontier_masks |= _own_bits(self._num_rows, num_new, self._num_words)
        self._frontier_ids = np.arange(first_row_id, first_row_id + parent_places.size).reshape(parent_places.shape)
        self._row_ids.append(self._frontier_ids)
        self._masks.append(self._frontier_masks)
        self._num_rows += num_new
        return parent_row_ids

    def pack(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return ``sequence_starts``, ``row_ids [T]`` and ``packed_mask [T, W]`` of all rows."""
        num_sequences, num_words = len(self._sequences), -(-self._num_rows // 32)
        starts = np.arange(0, (num_sequences + 1) * self._num_rows, self._num_rows, dtype=np.int32)
        row_ids = np.concatenate(self._row_ids, axis=1).ravel().astype(np.int32)
        masks = np.concatenate(self._masks, axis=1)[..., :num_words]
        return starts, row_ids, masks.reshape(-1, num_words).view(np.int32)


@lru_cache(maxsize=256)
def _own_bits(first: int, count: int, num_words: int) -> NDArray[np.uint32]:
    """Return the packed masks ``[count, W]`` of columns ``first, first + 1, ...``, one bit each."""
    columns = np.arange(first, first + count)
    bits = np.zeros((count, num_words), dtype=np.uint32)
    bits[np.arange(count), columns // 32] = np.left_shift(np.uint32(1), (columns % 32).astype(np.uint32))
    return bits

"""Reference-counted KV blocks, and the prefix cache that shares full ones.

A block is in exactly one of three states:

    empty   reference count 0, contents worthless          -> taken first
    cached  reference count 0, found by its tokens         -> taken when nothing is empty, least recently used first
    used    reference count = number of block tables that hold it (it may be published in the cache as well)

Free means empty or cached: ``num_free_blocks + num_used_blocks == num_blocks`` always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

ROOT_BLOCK = -1  # the parent of the first block of a sequence
UNDRAFTED_ROOT_BLOCK = -2  # the same where no drafter fills its pool: such blocks are of no use to who drafts

_Key = tuple[int, bytes]


class BlockPool:
    """Hand out block ids, count who holds them, and find blocks whose contents are already computed.

    The prefix cache maps (parent block id, the block's S token ids) to a block id, so equal keys mean equal prefixes
    exactly: a hash collision is told apart by comparison, and cannot hand over another prompt's KV. With ``lookahead``
    a key has so many token ids more, those behind the block that what is kept for it depends on. A parent's id can
    stand for the whole prefix because a published block never outlives its parent in the cache:

    - whoever holds a block holds its parent (``find_prefix`` walks from the root, and ``publish`` returns the canonical
      block, which the caller must hold from then on in place of its own copy);
    - ``release`` makes the last block of a sequence the least recently used one, hence children are evicted first.

    Not thread-safe: one thread owns a pool.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True, lookahead: int = 0) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lookahead = lookahead
        self.num_releases = 0
        self._prefix_cache = prefix_cache
        self._reference_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks whose contents can still be found."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take ``count <= num_free_blocks`` blocks with reference count 1; cached ones are evicted if need be."""
        assert 0 <= count <= self.num_free_blocks, f"{count} blocks asked of {self.num_free_blocks} free ones"
        block_ids = []
        for _ in range(count):
            block_id = self._empty.pop() if self._empty else self._evict()
            self._reference_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def find_prefix(self, token_ids: NDArray[np.int32], max_blocks: int, root: int = ROOT_BLOCK) -> list[int]:
        """Return the longest chain of published blocks, at most ``max_blocks``, that begins ``token_ids [n]``.

        ``root`` is the parent that the first of them was published with.

        The blocks are not taken: ``acquire`` them before anything else happens to the pool.
        """
        block_ids: list[int] = []
        if not self._prefix_cache:
            return block_ids
        data, num_bytes, parent = token_ids.astype(np.int32, copy=False).tobytes(), 4 * self.block_size, root
        num_key_bytes = num_bytes + 4 * self.lookahead
        for start in range(0, min(max_blocks * num_bytes, len(data) - num_key_bytes + 1), num_bytes):
            found = self._block_of.get((parent, data[start : start + num_key_bytes]))
            if found is None:
                break
            block_ids.append(found)
            parent = found
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block, which must be used or cached."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                del self._cached[block_id]
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a table, given in the table's order."""
        self.num_releases += 1
        for block_id in reversed(block_ids):
            self._reference_counts[block_id] -= 1
            assert self._reference_counts[block_id] >= 0, f"block {block_id} was released more often than taken"
            if self._reference_counts[block_id] == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._empty.append(block_id)

    def publish(self, block_id: int, parent: int, token_ids: NDArray[np.int32]) -> int:
        """Make a full, committed block findable and return the block that holds these tokens from now on.

        ``parent`` is the canonical block before it (a root at the start), which the caller holds as well;
        ``token_ids [S + lookahead]``. When another block already holds the same prefix, that one is returned with a
        reference for the caller, and the caller's copy is released.
        """
        if not self._prefix_cache:
            return block_id
        key = (parent, token_ids.astype(np.int32, copy=False).tobytes())
        assert len(key[1]) == 4 * (self.block_size + self.lookahead), "only full blocks are published"
        canonical = self._block_of.setdefault(key, block_id)
        if canonical == block_id:
            self._key_of[block_id] = key
        else:
            self.acquire((canonical,))
            self.release((block_id,))
        return canonical

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Prove that the pool and the tables of all live sequences agree.

        Raises: AssertionError when a block is lost or in two states, when its reference count is not the number of
        tables that hold it, when a block that was never published is in two tables, or when the cache is torn.
        """
        references = [0] * self.num_blocks
        for block_table in block_tables:
            for block_id in block_table:
                references[block_id] += 1
        for block_id, (expected, actual) in enumerate(zip(references, self._reference_counts, strict=True)):
            if expected != actual:
                raise AssertionError(
                    f"block {block_id}: in {expected} block tables, but its reference count is {actual}"
                )
            if expected > 1 and block_id not in self._key_of:
                raise AssertionError(f"block {block_id}: in {expected} block tables, but never published")
        unused = sorted([*self._empty, *self._cached])
        if unused != [block_id for block_id, count in enumerate(references) if count == 0]:
            raise AssertionError(
                f"free + used != total: {len(unused)} + {sum(map(bool, references))}, {self.num_blocks}"
            )
        if any(block_id in self._key_of for block_id in self._empty) or len(self._key_of) != len(self._block_of):
            raise AssertionError("prefix cache: an empty block is published, or two keys name one block")
        for (parent, _), block_id in self._block_of.items():
            if block_id not in self._key_of or (parent >= 0 and parent not in self._key_of):
                raise AssertionError(f"prefix cache: block {block_id} outlived its parent {parent}")

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        return block_id

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.block_pool import ROOT_BLOCK, BlockPool

BLOCK_SIZE = 2


def tokens(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def fill(pool: BlockPool, prompt: NDArray[np.int32]) -> list[int]:
    """Do what a prefill does: share what is known, allocate the rest, publish the full blocks; return the table."""
    table = pool.find_prefix(prompt, prompt.size // BLOCK_SIZE)
    num_shared = len(table)
    pool.acquire(table)
    table += pool.allocate(-(-prompt.size // BLOCK_SIZE) - num_shared)
    for index in range(num_shared, prompt.size // BLOCK_SIZE):
        parent = table[index - 1] if index else ROOT_BLOCK
        table[index] = pool.publish(table[index], parent, prompt[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
    return table


def test_a_released_prefix_is_found_again_and_counts_as_free() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    table = fill(pool, tokens(1, 2, 3, 4, 5))
    assert (pool.num_used_blocks, pool.num_free_blocks) == (3, 1)
    pool.release(table)
    assert (pool.num_used_blocks, pool.num_free_blocks, pool.num_cached_blocks) == (0, 4, 2)
    assert pool.find_prefix(tokens(1, 2, 3, 4, 9, 9), 3) == table[:2]
    assert pool.find_prefix(tokens(1, 2, 3, 4, 9, 9), 1) == table[:1]
    assert pool.find_prefix(tokens(3, 4), 1) == []
    assert pool.find_prefix(tokens(1), 1) == []


def test_equal_tokens_after_different_prefixes_are_different_blocks() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    first, second = fill(pool, tokens(1, 1, 7, 7)), fill(pool, tokens(2, 2, 7, 7))
    assert not set(first) & set(second)


def test_the_last_block_of_a_prefix_is_evicted_first() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    table = fill(pool, tokens(1, 2, 3, 4, 5, 6))
    pool.release(table)
    assert pool.allocate(1) == [table[2]]
    assert pool.find_prefix(tokens(1, 2, 3, 4, 5, 6), 3) == table[:2]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    old, new = fill(pool, tokens(1, 1)), fill(pool, tokens(2, 2))
    pool.release(old)
    pool.release(new)
    pool.acquire(old)
    pool.release(old)
    assert pool.allocate(1) == new


def test_a_twin_is_replaced_by_the_published_block() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    first, twin = pool.allocate(1), pool.allocate(1)
    assert pool.publish(first[0], ROOT_BLOCK, tokens(1, 2)) == first[0]
    assert pool.publish(twin[0], ROOT_BLOCK, tokens(1, 2)) == first[0]
    pool.check_integrity([first, first])
    assert pool.num_free_blocks == 3


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    pool = BlockPool(4, BLOCK_SIZE, prefix_cache=False)
    first, second = fill(pool, tokens(1, 2)), fill(pool, tokens(1, 2))
    assert first != second
    pool.release(first)
    assert pool.num_cached_blocks == 0


@pytest.mark.parametrize("damage", ["lost", "double", "shared", "torn"])
def test_the_integrity_check_can_fail(damage: str) -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    table = fill(pool, tokens(1, 2, 3, 4, 5))
    tables = [table]
    pool.check_integrity(tables)
    if damage == "lost":
        tables = []
    elif damage == "double":
        pool._empty.append(table[0])
    elif damage == "shared":
        tables = [table, table[2:]]
        pool._reference_counts[table[2]] += 1
    else:
        del pool._key_of[table[0]]
    with pytest.raises(AssertionError, match=r"block|free \+ used"):
        pool.check_integrity(tables)


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(lambda values: np.array(values, dtype=np.int32))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(prompts, st.integers(0, 5)), max_size=60))
def test_blocks_always_hold_the_prefix_they_are_found_by(events: list[NDArray[np.int32] | int]) -> None:
    """Model: contents[block] is the whole prefix computed into it; binary tokens make prefixes collide all the time."""
    pool = BlockPool(12, BLOCK_SIZE)
    contents: dict[int, bytes] = {}
    live: list[list[int]] = []
    for event in events:
        if isinstance(event, int):
            if event < len(live):
                pool.release(live.pop(event))
        else:
            shared = pool.find_prefix(event, event.size // BLOCK_SIZE)
            pool.acquire(shared)
            fits = -(-event.size // BLOCK_SIZE) - len(shared) <= pool.num_free_blocks
            pool.release(shared)
            if not fits:
                continue
            table = fill(pool, event)
            for index, block_id in enumerate(table):
                prefix = event[: (index + 1) * BLOCK_SIZE].tobytes()
                if block_id in shared:
                    assert contents[block_id] == prefix
                contents[block_id] = prefix
            live.append(table)
        pool.check_integrity(live)
    for table in live:
        pool.release(table)
    assert pool.num_free_blocks == pool.num_blocks
    pool.check_integrity([])

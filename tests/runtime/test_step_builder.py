"""What a step's arrays say, and what the builder of steps keeps."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np

from draftline.draft_trees import chain_trees
from draftline.runtime.limits import EngineLimits
from draftline.runtime.request import Output, Request
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import StepBuilder
from draftline.tree import build_tree_mask, unpack_mask
from draftline.tree_pruning import merge_trees


def ignore(output: Output) -> None:
    pass


def make_sequence(builder: StepBuilder, num_tokens: int, num_committed: int, num_scheduled: int) -> Sequence:
    prompt_ids = np.arange(num_tokens, dtype=np.int32)
    sequence = Sequence(Request("a", prompt_ids.tolist(), 8, ignore), prompt_ids, time.time_ns())
    builder.take_seat(sequence)
    builder.append_blocks(sequence, list(range(-(-num_tokens // builder.block_size))))
    sequence.num_committed, sequence.num_scheduled = num_committed, num_scheduled
    return sequence


def test_a_builder_of_large_steps_is_small() -> None:
    tracemalloc.start()
    try:
        StepBuilder(EngineLimits(16, 4096, 65536, 16, 2048))
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def test_prompts_beside_a_tree_that_branches_are_causal() -> None:
    builder = StepBuilder(EngineLimits(4, 256, 128, 16, 64))
    decoding = make_sequence(builder, 5, 4, 1)
    prefilling = [make_sequence(builder, 50, 0, 50), make_sequence(builder, 90, 16, 40)]
    roots, log_probs, ends = np.int32([4]), np.float32([[-1, -1]]), np.array([2])
    chains = [chain_trees(roots, np.int32([tokens]), log_probs, ends, 0) for tokens in ([7, 8], [9, 8])]
    trees = merge_trees(chains)
    assert trees.parents.tolist() == [[-1, 0, 1, 0, 3]]
    batch = builder.build([decoding], trees, prefilling).batch
    assert batch.packed_mask is not None
    mask = unpack_mask(batch.packed_mask, 64)
    expected = np.zeros((5 + 50 + 40, 64), dtype=np.bool_)
    expected[:5, :5] = build_tree_mask(trees.parents[0])
    expected[5:55, :50] = np.tri(50, dtype=np.bool_)
    expected[55:, :40] = np.tri(40, dtype=np.bool_)
    assert np.array_equal(mask, expected)

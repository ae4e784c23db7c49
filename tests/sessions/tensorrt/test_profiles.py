"""Sizes that networks are built for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftline.sessions.tensorrt.profiles import Range, StepLimits, draft_profiles, target_profiles

limits = st.builds(
    lambda batch, tokens, seq, block, nodes, frontier, depths: StepLimits(
        batch, seq, max(batch, tokens, nodes), block, -(-seq // block) * 2, nodes, frontier, frontier * depths
    ),
    st.integers(1, 64),
    st.integers(1, 512),
    st.integers(2, 9000),
    st.sampled_from([8, 16, 64, 128]),
    st.integers(1, 256),
    st.integers(0, 10),
    st.integers(1, 9),
)


@given(limits)
def test_ranges_rise_and_hold_every_step(limits: StepLimits) -> None:
    decode, prefill = target_profiles(limits).values()
    fill, tree = draft_profiles(limits).values()
    for profile in (decode, prefill, fill, tree):
        assert all(0 <= low <= best <= high for low, best, high in profile.values()), profile
    assert decode["T"].high == min(limits.max_num_tokens, limits.max_batch_size * limits.max_nodes)
    assert 32 * decode["W"].high >= min(limits.max_nodes, decode["T"].high)
    assert prefill["T"].high == limits.max_num_tokens
    assert min(64, limits.max_num_tokens) <= prefill["R"].high <= limits.max_num_tokens
    assert prefill["R"].high >= decode["R"].high
    assert 32 * prefill["W"].high >= limits.max_num_tokens
    assert prefill["max_blocks"].high * limits.block_size >= limits.max_seq_len
    assert all(profile["B_plus_1"].high == limits.max_batch_size + 1 for profile in (decode, prefill, fill, tree))


@given(limits)
def test_a_drafters_rows_are_the_targets_features_or_its_own(limits: StepLimits) -> None:
    fill, tree = draft_profiles(limits).values()
    assert fill["F"] == fill["N"] == fill["T"]
    assert (fill["O"], fill["M"], tree["F"]) == (Range(0, 0, 0),) * 3
    assert tree["O"] == tree["N"]
    assert tree["T"].high == tree["M"].high + tree["N"].high
    assert tree["T"].low == tree["M"].low + tree["N"].low
    known = 2 * limits.max_num_tokens - 1 + limits.max_batch_size  # a step's, one before that waited, and roots
    assert fill["N"].high >= known
    assert tree["M"].high >= known + limits.max_batch_size * limits.grown_nodes
    assert tree["N"].high >= limits.max_batch_size * limits.frontier_nodes


def test_a_small_engine() -> None:
    profiles = target_profiles(StepLimits(16, 4352, 512, 16, 4096, max_nodes=32, frontier_nodes=6, grown_nodes=24))
    assert profiles["decode"]["T"] == (1, 256, 512)
    assert profiles["decode"]["W"] == (1, 1, 1)
    assert profiles["prefill"]["T"] == (1, 512, 512)
    assert profiles["prefill"]["max_blocks"] == (1, 136, 272)

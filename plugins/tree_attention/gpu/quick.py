"""``tree_attention`` for TensorRT's quick plugins, which launch one kernel and pass it inputs, integers and outputs."""

import triton
import triton.language as tl

from .attention import tree_attention


@triton.jit
def tree_attention_quick(
    q,
    k_new,
    v_new,
    kv_pool,
    block_table,
    context_lengths,
    sequence_starts,
    packed_mask,
    scale_bits,
    key_scale_bits,
    value_scale_bits,
    num_tokens,
    num_sequences,
    max_blocks,
    mask_words,
    out,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PART: tl.constexpr,
    LAST_PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV_IS_FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SECTION_KEYS: tl.constexpr,
    MIN_KEYS_PER_TOKEN: tl.constexpr,
    MAX_SECTIONS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """``tree_attention`` in one section, without a workspace. Scales come as the bits of float32."""
    tl.static_assert(MAX_SECTIONS == 1)
    tree_attention(
        q,
        k_new,
        v_new,
        kv_pool,
        block_table,
        context_lengths,
        sequence_starts,
        packed_mask,
        out,
        out,  # no workspace: nothing is written to it
        scale_bits.to(tl.float32, bitcast=True),
        key_scale_bits.to(tl.float32, bitcast=True),
        value_scale_bits.to(tl.float32, bitcast=True),
        num_tokens,
        num_sequences,
        max_blocks,
        mask_words,
        MAX_SECTIONS,
        NUM_HEADS,
        NUM_KV_HEADS,
        HEAD_SIZE,
        PART,
        LAST_PART,
        BLOCK_SIZE,
        WINDOW,
        SOFTCAP,
        KV_IS_FLOAT8,
        TILE_ROWS,
        TILE_KEYS,
        MIN_SECTION_KEYS,
        MIN_KEYS_PER_TOKEN,
        MAX_SECTIONS,
        MAX_SPLIT_ROWS,
        PRECISION,
        DOT_IN_FLOAT32,
    )

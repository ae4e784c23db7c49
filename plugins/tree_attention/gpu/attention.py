"""Attention of in-step tokens over committed keys and their ancestors: the kernel of ``draftline::TreeAttention``.

Source: tiles of keys with a running maximum and sum as in FlashAttention (arXiv 2205.14135, algorithm 1), keys cut
among programs as in Flash-Decoding (Dao et al., 2023), query heads of one key/value head in one tile.
"""

import triton
import triton.language as tl

from .float8 import decode_float8, round_float8
from .sections import count_depths, count_section_keys, find_first_key, find_sequence

NODE_TILE = tl.constexpr(32)  # in-step keys of a tile: one mask word


@triton.jit
def load_committed(
    pool, rows, is_key, columns, HEAD_SIZE: tl.constexpr, KV_IS_FLOAT8: tl.constexpr, DTYPE: tl.constexpr
):
    """Return keys or values ``[keys, columns]`` of rows of the pool; 0 where there is none."""
    is_read = is_key[:, None] & (columns < HEAD_SIZE)[None, :]
    kv = tl.load(pool + rows[:, None] * HEAD_SIZE + columns[None, :], mask=is_read, other=0)
    return decode_float8(kv, DTYPE) if KV_IS_FLOAT8 else kv.to(DTYPE)


@triton.jit
def load_in_step(
    new, rows, is_node, columns, scale, HEAD_SIZE: tl.constexpr, KV_IS_FLOAT8: tl.constexpr, POOL_DTYPE: tl.constexpr
):
    """Return in-step keys or values, rounded as the pool will hold them: divided by ``scale`` if it is float8."""
    is_read = is_node[:, None] & (columns < HEAD_SIZE)[None, :]
    kv = tl.load(new + rows[:, None] * HEAD_SIZE + columns[None, :], mask=is_read, other=0.0)
    if KV_IS_FLOAT8:
        return round_float8(kv.to(tl.float32) / scale).to(kv.dtype)
    else:
        return kv.to(POOL_DTYPE).to(kv.dtype)


@triton.jit
def attend(
    q,
    k,
    v,
    is_attended,
    score_scale,
    row_max,
    row_sum,
    values,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Add a tile of keys to the running maximum, sum and values of each row; scores are powers of two.

    A row that attends to none of them stays as it was, to the bit, and one that has not met any has maximum -inf.
    """
    weights_dtype: tl.constexpr = q.dtype
    if DOT_IN_FLOAT32:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
    scores = tl.where(is_attended, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    weights = weights.to(weights_dtype).to(v.dtype)
    values = tl.dot(weights, v, values * decay[:, None], input_precision=PRECISION)
    return new_max, row_sum, values


@triton.jit
def tree_attention(
    q,
    k_new,
    v_new,
    kv_pool,
    block_table,
    context_lengths,
    sequence_starts,
    packed_mask,
    out,
    workspace,
    scale,
    key_scale,
    value_scale,
    num_tokens,
    num_sequences,
    max_blocks,
    mask_words,
    num_sections,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    KV_IS_FLOAT8: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SECTION_KEYS: tl.constexpr,
    MAX_SECTIONS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Program (tile, kv_head, section): a tile of one sequence's rows over one section of its committed keys.

    The last section goes on over the in-step keys. Where there are several, each leaves its values, maximum and sum in
    ``workspace`` (``[T, H, sections, D]``, then ``[T, H, sections, 2]``) for ``tree_attention_reduce``.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ROWS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(1)
    section = tl.program_id(2)
    sequence = find_sequence(sequence_starts, num_sequences, tl.program_id(0), ROWS)
    start = tl.load(sequence_starts + sequence)
    length = tl.load(sequence_starts + sequence + 1) - start
    first_row = (tl.program_id(0) - (start - sequence) // ROWS - sequence) * ROWS
    context = tl.load(context_lengths + sequence)
    first_key = find_first_key(context, WINDOW, TILE_KEYS)
    section_keys = count_section_keys(
        context - first_key, length, TILE_KEYS, MIN_SECTION_KEYS, MAX_SECTIONS, MAX_SPLIT_ROWS
    )
    sections = tl.maximum((context - first_key + section_keys - 1) // section_keys, 1)
    if (first_row >= length) | (section >= sections):
        return

    dtype: tl.constexpr = q.dtype.element_ty
    pool_dtype: tl.constexpr = kv_pool.dtype.element_ty
    tile_rows = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, PADDED_HEAD_SIZE)
    rows = first_row + tile_rows // GROUP
    is_row = (tile_rows < ROWS * GROUP) & (rows < length)
    end_row = tl.minimum(first_row + ROWS, length)
    tokens = (start + rows).to(tl.int64)
    places = tokens * NUM_HEADS + kv_head * GROUP + tile_rows % GROUP
    is_place = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
    queries = tl.load(q + places[:, None] * HEAD_SIZE + columns[None, :], mask=is_place, other=0.0)
    score_scale = scale * key_scale * 1.4426950408889634  # log2(e)

    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    values = tl.zeros([TILE_ROWS, PADDED_HEAD_SIZE], tl.float32)

    key_begin = first_key + section * section_keys
    key_end = tl.minimum(key_begin + section_keys, context)
    if WINDOW > 0:
        depths = count_depths(packed_mask, mask_words, tokens, is_row, (end_row + 31) // 32)
        least_depth = tl.min(tl.where(is_row, depths, context + length))
        first_seen = tl.maximum(context + least_depth + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
        key_begin = tl.maximum(key_begin, first_seen)

    for tile_begin in tl.range(key_begin, key_end, TILE_KEYS):
        positions = tile_begin + tl.arange(0, TILE_KEYS)
        is_key = positions < key_end
        blocks = tl.load(block_table + sequence * max_blocks + positions // BLOCK_SIZE, mask=is_key, other=0)
        key_rows = (blocks.to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
        k = load_committed(kv_pool, key_rows, is_key, columns, HEAD_SIZE, KV_IS_FLOAT8, dtype)
        v = load_committed(
            kv_pool, key_rows + NUM_KV_HEADS * BLOCK_SIZE, is_key, columns, HEAD_SIZE, KV_IS_FLOAT8, dtype
        )
        is_attended = is_key[None, :]
        if WINDOW > 0:
            is_attended = is_attended & (positions[None, :] > (context + depths)[:, None] - WINDOW)
        row_max, row_sum, values = attend(
            queries, k, v, is_attended, score_scale, row_max, row_sum, values, PRECISION, DOT_IN_FLOAT32
        )

    if section == sections - 1:
        # A row's ancestors come before it: no bit is set behind the tile's last row.
        for tile_begin in tl.range(0, end_row, NODE_TILE):
            places_in_word = tl.arange(0, NODE_TILE)
            nodes = tile_begin + places_in_word
            is_node = nodes < end_row
            node_tokens = (start + nodes).to(tl.int64)
            node_rows = node_tokens * NUM_KV_HEADS + kv_head
            k = load_in_step(k_new, node_rows, is_node, columns, key_scale, HEAD_SIZE, KV_IS_FLOAT8, pool_dtype)
            v = load_in_step(v_new, node_rows, is_node, columns, value_scale, HEAD_SIZE, KV_IS_FLOAT8, pool_dtype)
            word = tile_begin // NODE_TILE
            words = tl.load(packed_mask + tokens * mask_words + word, mask=is_row, other=0)
            is_attended = ((words[:, None] >> places_in_word[None, :]) & 1) != 0
            if WINDOW > 0:
                node_depths = count_depths(packed_mask, mask_words, node_tokens, is_node, word + 1)
                is_attended = is_attended & (depths[:, None] - node_depths[None, :] < WINDOW)
            row_max, row_sum, values = attend(
                queries, k, v, is_attended, score_scale, row_max, row_sum, values, PRECISION, DOT_IN_FLOAT32
            )

    if sections == 1:
        result = values / tl.where(is_row, row_sum, 1.0)[:, None] * value_scale
        tl.store(out + places[:, None] * HEAD_SIZE + columns[None, :], result.to(dtype), mask=is_place)
    else:
        partials = places * num_sections + section
        is_met = is_place & (row_max > float("-inf"))[:, None]
        tl.store(workspace + partials[:, None] * HEAD_SIZE + columns[None, :], values, mask=is_met)
        totals = workspace + num_tokens.to(tl.int64) * NUM_HEADS * num_sections * HEAD_SIZE + partials * 2
        tl.store(totals, row_max, mask=is_row)
        tl.store(totals + 1, row_sum, mask=is_row)

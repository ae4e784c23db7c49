"""Attention of in-step tokens over committed keys and their ancestors: the kernel of ``draftline::TreeAttention``.

Source: tiles of keys with a running maximum and sum as in FlashAttention (arXiv 2205.14135, algorithm 1), keys cut
among programs as in Flash-Decoding (Dao et al., 2023), query heads of one key/value head in one tile.
"""

import triton
import triton.language as tl

from .float8 import decode_float8, round_float8
from .sections import (
    count_depths,
    count_section_keys,
    find_first_ancestors,
    find_first_key,
    find_partial_row,
    find_sequence,
)

NODE_TILE = tl.constexpr(32)  # in-step keys of a tile: one mask word
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_parts(source, rows, is_row, HEAD_SIZE: tl.constexpr, PART: tl.constexpr, LAST_PART: tl.constexpr):
    """Return rows of ``HEAD_SIZE`` columns, cut by columns; 0 where there is no row, and behind the last column."""
    parts = ()
    for part in tl.static_range((HEAD_SIZE + PART - 1) // PART):
        columns = part * PART + tl.arange(0, LAST_PART if (part + 1) * PART >= HEAD_SIZE else PART)
        is_read = is_row[:, None]
        if (part + 1) * PART > HEAD_SIZE:
            is_read = is_read & (columns < HEAD_SIZE)[None, :]
        parts = parts + (tl.load(source + rows[:, None] * HEAD_SIZE + columns[None, :], mask=is_read, other=0),)
    return parts


@triton.jit
def widen(parts, DTYPE: tl.constexpr, KV_IS_FLOAT8: tl.constexpr):
    """Return committed keys or values in the model's dtype."""
    widened = ()
    for part in tl.static_range(len(parts)):
        widened = widened + (decode_float8(parts[part], DTYPE) if KV_IS_FLOAT8 else parts[part].to(DTYPE),)
    return widened


@triton.jit
def round_parts(parts, scale, POOL_DTYPE: tl.constexpr, KV_IS_FLOAT8: tl.constexpr):
    """Return in-step keys or values as the pool will hold them, in their own dtype; of float8 divided by ``scale``."""
    rounded = ()
    for part in tl.static_range(len(parts)):
        kv = parts[part]
        if KV_IS_FLOAT8:
            rounded = rounded + (round_float8(kv.to(tl.float32) / scale).to(kv.dtype),)
        else:
            rounded = rounded + (kv.to(POOL_DTYPE).to(kv.dtype),)
    return rounded


@triton.jit
def tanh(x):
    """Return tanh of float32 ``x`` within 1e-6 of its size; what is not finite becomes NaN.

    Below 1/4 by its Taylor series, whose next term is 1e-8 of it there; beyond, 1 - 2 / (e^2x + 1) loses no digits.
    """
    square = x * x
    terms = square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    far = 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2_E)) + 1.0)
    near_or_far = tl.where(tl.abs(x) < 0.25, x + x * terms, far)
    return tl.where(tl.abs(x) == float("inf"), float("nan"), near_or_far)


@triton.jit
def attend(
    queries,
    k,
    v,
    is_attended,
    score_scale,
    row_max,
    row_sum,
    values,
    SOFTCAP: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    DOT_IN_FLOAT32: tl.constexpr,
):
    """Add a tile of keys to the running maximum, sum and values of each row; scores are powers of two.

    A row that attends to none of them stays as it was, to the bit, and one that has not met any has maximum -inf.
    """
    scores = tl.zeros([queries[0].shape[0], k[0].shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        if DOT_IN_FLOAT32:
            scores = tl.dot(queries[part].to(tl.float32), tl.trans(k[part].to(tl.float32)), scores)
        else:
            scores = tl.dot(queries[part], tl.trans(k[part]), scores, input_precision=PRECISION)
    scores = scores * score_scale
    if SOFTCAP > 0:
        scores = tanh(scores) * (SOFTCAP * LOG2_E)
    scores = tl.where(is_attended, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(weights, axis=1)
    weights = weights.to(queries[0].dtype)
    new_values = ()
    for part in tl.static_range(PARTS):
        decayed = values[part] * decay[:, None]
        if DOT_IN_FLOAT32:
            decayed = tl.dot(weights.to(tl.float32), v[part].to(tl.float32), decayed)
        else:
            decayed = tl.dot(weights, v[part], decayed, input_precision=PRECISION)
        new_values = new_values + (decayed,)
    return new_max, row_sum, new_values


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
    sinks,
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
    PART: tl.constexpr,
    LAST_PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
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
    """Program (tile, kv_head, section): a tile of one sequence's rows over one section of its committed keys.

    The last section goes on over the in-step keys. Where there are several, each leaves its values, maximum and sum in
    ``workspace`` (``[rows, H, sections, D]``, then ``[rows, H, sections, 2]``) for ``tree_attention_reduce``.
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
        context - first_key, length, TILE_KEYS, MIN_SECTION_KEYS, MIN_KEYS_PER_TOKEN, MAX_SECTIONS, MAX_SPLIT_ROWS
    )
    sections = tl.maximum((context - first_key + section_keys - 1) // section_keys, 1)
    if (first_row >= length) | (section >= sections):
        return

    dtype: tl.constexpr = q.dtype.element_ty
    pool_dtype: tl.constexpr = kv_pool.dtype.element_ty
    PARTS: tl.constexpr = (HEAD_SIZE + PART - 1) // PART
    tile_rows = tl.arange(0, TILE_ROWS)
    rows = first_row + tile_rows // GROUP
    is_row = (tile_rows < ROWS * GROUP) & (rows < length)
    end_row = tl.minimum(first_row + ROWS, length)
    tokens = (start + rows).to(tl.int64)
    places = tokens * NUM_HEADS + kv_head * GROUP + tile_rows % GROUP
    score_scale = scale * key_scale / SOFTCAP if SOFTCAP > 0 else scale * key_scale * LOG2_E
    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - the compiler's, the inner one the program's
        if section == sections - 1:  # the one with keys for every row
            own_sinks = tl.load(sinks + kv_head * GROUP + tile_rows % GROUP, mask=is_row, other=float("-inf"))
            row_max = own_sinks * LOG2_E
            row_sum = tl.where(own_sinks > float("-inf"), 1.0, 0.0)
    queries = load_parts(q, places, is_row, HEAD_SIZE, PART, LAST_PART)
    values = ()
    for part in tl.static_range(PARTS):
        values = values + (tl.zeros(queries[part].shape, tl.float32),)

    key_begin = first_key + section * section_keys
    key_end = tl.minimum(key_begin + section_keys, context)
    first_counted = 0
    if WINDOW > 0:
        num_words = (end_row + 31) // 32
        depths = count_depths(packed_mask, mask_words, tokens, is_row, num_words)
        first_ancestors = find_first_ancestors(packed_mask, mask_words, tokens, is_row, num_words, depths + 1 - WINDOW)
        least_depth = tl.min(tl.where(is_row, depths, context + length))
        first_seen = tl.maximum(context + least_depth + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
        key_begin = tl.maximum(key_begin, first_seen)
        # Keys are counted from the first: Triton copies ahead only in loops whose beginning it can follow.
        first_counted = key_begin

    for tile_begin in tl.range(key_begin - first_counted, key_end - first_counted, TILE_KEYS):
        positions = first_counted + tile_begin + tl.arange(0, TILE_KEYS)
        is_key = positions < key_end
        blocks = tl.load(block_table + sequence * max_blocks + positions // BLOCK_SIZE, mask=is_key, other=0)
        key_rows = (blocks.to(tl.int64) * 2 * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + positions % BLOCK_SIZE
        k = load_parts(kv_pool, key_rows, is_key, HEAD_SIZE, PART, LAST_PART)
        v = load_parts(kv_pool, key_rows + NUM_KV_HEADS * BLOCK_SIZE, is_key, HEAD_SIZE, PART, LAST_PART)
        k, v = widen(k, dtype, KV_IS_FLOAT8), widen(v, dtype, KV_IS_FLOAT8)
        is_attended = is_key[None, :]
        if WINDOW > 0:
            is_attended = is_attended & (positions[None, :] > (context + depths)[:, None] - WINDOW)
        row_max, row_sum, values = attend(
            queries, k, v, is_attended, score_scale, row_max, row_sum, values, SOFTCAP, PARTS, PRECISION, DOT_IN_FLOAT32
        )

    if section == sections - 1:
        # A row's ancestors come before it: no bit is set behind the tile's last row.
        for tile_begin in tl.range(0, end_row, NODE_TILE):
            places_in_word = tl.arange(0, NODE_TILE)
            nodes = tile_begin + places_in_word
            is_node = nodes < end_row
            node_tokens = (start + nodes).to(tl.int64)
            node_rows = node_tokens * NUM_KV_HEADS + kv_head
            k = load_parts(k_new, node_rows, is_node, HEAD_SIZE, PART, LAST_PART)
            v = load_parts(v_new, node_rows, is_node, HEAD_SIZE, PART, LAST_PART)
            k = round_parts(k, key_scale, pool_dtype, KV_IS_FLOAT8)
            v = round_parts(v, value_scale, pool_dtype, KV_IS_FLOAT8)
            word = tile_begin // NODE_TILE
            words = tl.load(packed_mask + tokens * mask_words + word, mask=is_row, other=0)
            is_attended = ((words[:, None] >> places_in_word[None, :]) & 1) != 0
            if WINDOW > 0:
                is_attended = is_attended & (nodes[None, :] >= first_ancestors[:, None])
            row_max, row_sum, values = attend(
                queries, k, v, is_attended, score_scale, row_max, row_sum, values, SOFTCAP, PARTS, PRECISION,
                DOT_IN_FLOAT32,
            )  # fmt: skip

    partial_row, partial_rows = find_partial_row(sequence, start, num_tokens, num_sequences, MAX_SPLIT_ROWS)
    partials = (places + (partial_row - start) * NUM_HEADS) * num_sections + section
    if sections > 1:
        totals = workspace + partial_rows * NUM_HEADS * num_sections * HEAD_SIZE + partials * 2
        tl.store(totals, row_max, mask=is_row)
        tl.store(totals + 1, row_sum, mask=is_row)
    factor = value_scale / tl.where(row_sum == 0.0, 1.0, row_sum)
    for part in tl.static_range(PARTS):
        columns = part * PART + tl.arange(0, values[part].shape[1])
        is_place = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
        if sections == 1:
            result = (values[part] * factor[:, None]).to(dtype)
            tl.store(out + places[:, None] * HEAD_SIZE + columns[None, :], result, mask=is_place)
        else:
            is_met = is_place & (row_max > float("-inf"))[:, None]
            tl.store(workspace + partials[:, None] * HEAD_SIZE + columns[None, :], values[part], mask=is_met)

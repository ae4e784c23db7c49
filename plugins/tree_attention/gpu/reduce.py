"""Merge the sections of a row: the second kernel of ``draftline::TreeAttention``."""

import triton
import triton.language as tl

from .sections import count_section_keys, find_first_key, find_partial_row, find_sequence

SECTION_TILE = tl.constexpr(16)


@triton.jit
def tree_attention_reduce(
    context_lengths,
    sequence_starts,
    out,
    workspace,
    value_scale,
    num_tokens,
    num_sequences,
    num_sections,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_SECTION_KEYS: tl.constexpr,
    MIN_KEYS_PER_TOKEN: tl.constexpr,
    MAX_SECTIONS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
):
    """Program (token, head): sections from first to last. Rows of one section are in ``out`` already."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    sequence = find_sequence(sequence_starts, num_sequences, token, 1)
    start = tl.load(sequence_starts + sequence)
    end = tl.load(sequence_starts + sequence + 1)
    context = tl.load(context_lengths + sequence)
    num_keys = context - find_first_key(context, WINDOW, TILE_KEYS)
    section_keys = count_section_keys(
        num_keys, end - start, TILE_KEYS, MIN_SECTION_KEYS, MIN_KEYS_PER_TOKEN, MAX_SECTIONS, MAX_SPLIT_ROWS
    )
    sections = (num_keys + section_keys - 1) // section_keys
    if (token >= end) | (sections <= 1):
        return

    columns = tl.arange(0, PADDED_HEAD_SIZE)
    is_column = columns < HEAD_SIZE
    partial_row, partial_rows = find_partial_row(sequence, start, num_tokens, num_sequences, MAX_SPLIT_ROWS)
    first_partial = ((partial_row + token - start) * NUM_HEADS + head) * num_sections
    all_totals = workspace + partial_rows * NUM_HEADS * num_sections * HEAD_SIZE
    row_max = float("-inf")
    row_sum = 0.0
    values = tl.zeros([PADDED_HEAD_SIZE], tl.float32)
    for tile_begin in range(0, sections, SECTION_TILE):
        section = tile_begin + tl.arange(0, SECTION_TILE)
        is_section = section < sections
        partials = first_partial + section
        section_max = tl.load(all_totals + partials * 2, mask=is_section, other=float("-inf"))
        section_sum = tl.load(all_totals + partials * 2 + 1, mask=is_section, other=0.0)
        # A section whose keys are all behind the row's window has left no values.
        is_read = (section_max > float("-inf"))[:, None] & is_column[None, :]
        section_values = tl.load(workspace + partials[:, None] * HEAD_SIZE + columns[None, :], mask=is_read, other=0.0)
        new_max = tl.maximum(row_max, tl.max(section_max, axis=0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(section_max - shift)
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(weights * section_sum, axis=0)
        values = values * decay + tl.sum(weights[:, None] * section_values, axis=0)
        row_max = new_max
    result = values / row_sum * value_scale
    tl.store(
        out + (token.to(tl.int64) * NUM_HEADS + head) * HEAD_SIZE + columns,
        result.to(out.dtype.element_ty),
        mask=is_column,
    )

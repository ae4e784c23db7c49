"""Where a program finds its work: sequences of packed tokens, sections of committed keys, depths of rows."""

import triton
import triton.language as tl


@triton.jit
def find_sequence(sequence_starts, num_sequences, tile, ROWS: tl.constexpr):
    """Return the sequence that owns ``tile``, counted over all sequences in tiles of ``ROWS`` in-step tokens.

    Sequence b begins with tile ``(sequence_starts[b] - b) // ROWS + b``: room for ``ceil(length / ROWS)`` tiles each,
    as each has a row at least. The last of them may be empty. With one row to a tile, tiles are tokens.
    """
    low = 0
    high = num_sequences  # invariant: first tile of low <= tile < first tile of high
    while high - low > 1:
        middle = (low + high) // 2
        begins = (tl.load(sequence_starts + middle) - middle) // ROWS + middle <= tile
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit
def find_first_key(context, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Return the tile of keys where those of the root's window begin: no row of the sequence sees one before it."""
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(context + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
    return first_key


@triton.jit
def count_section_keys(
    num_keys,
    length,
    TILE_KEYS: tl.constexpr,
    MIN_SECTION_KEYS: tl.constexpr,
    MIN_KEYS_PER_TOKEN: tl.constexpr,
    MAX_SECTIONS: tl.constexpr,
    MAX_SPLIT_ROWS: tl.constexpr,
):
    """Return the keys of a section, whole tiles of them: the same for every batch that the sequence is part of."""
    least = tl.maximum(length * MIN_KEYS_PER_TOKEN, MIN_SECTION_KEYS)
    sections = tl.minimum(num_keys // least, MAX_SECTIONS)
    sections = tl.where(length > MAX_SPLIT_ROWS, 1, tl.maximum(sections, 1))
    keys = (num_keys + sections - 1) // sections
    return tl.maximum((keys + TILE_KEYS - 1) // TILE_KEYS, 1) * TILE_KEYS


@triton.jit
def find_partial_row(sequence, start, num_tokens, num_sequences, MAX_SPLIT_ROWS: tl.constexpr):
    """Return where the rows of a sequence begin in the workspace, and how many rows it has: tokens, if they are fewer
    than the rows that all sequences could have there."""
    all_rows = num_sequences * MAX_SPLIT_ROWS
    first = tl.where(num_tokens <= all_rows, start, sequence * MAX_SPLIT_ROWS)
    return first.to(tl.int64), tl.minimum(num_tokens, all_rows).to(tl.int64)


@triton.jit
def count_bits(words):
    """Return the number of set bits of each int32."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def count_depths(packed_mask, mask_words, tokens, is_token, num_words):
    """Return the depth of each token, the number of its ancestors; no bit is set behind its first ``num_words``."""
    ancestors = tl.where(is_token, 0, 1)
    for word in range(0, num_words):
        words = tl.load(packed_mask + tokens * mask_words + word, mask=is_token, other=0)
        ancestors += count_bits(words)
    return ancestors - 1


@triton.jit
def find_bit(words, index):
    """Return the place of the set bit that ``index`` others are below, in each int32."""
    place = tl.zeros(words.shape, tl.int32)
    for step in tl.static_range(5):
        num_below = count_bits((words >> place) & ((1 << (16 >> step)) - 1))
        is_above = index >= num_below
        index = tl.where(is_above, index - num_below, index)
        place = tl.where(is_above, place + (16 >> step), place)
    return place


@triton.jit
def find_first_ancestors(packed_mask, mask_words, tokens, is_token, num_words, num_skipped):
    """Return each token's ancestor that ``num_skipped`` others, 0 or less for none, are above: its place in the step.

    Nodes of a path are in the order of their depths, so a window of the last ones begins at a place.
    """
    first = tl.where(is_token, 0, 0)
    num_above = first
    for word in range(0, num_words):
        words = tl.load(packed_mask + tokens * mask_words + word, mask=is_token, other=0)
        num_ancestors = num_above + count_bits(words)
        is_here = (num_above <= num_skipped) & (num_skipped < num_ancestors) & (num_skipped > 0)
        first = tl.where(is_here, word * 32 + find_bit(words, num_skipped - num_above), first)
        num_above = num_ancestors
    return first

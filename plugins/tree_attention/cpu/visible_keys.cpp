#include "visible_keys.h"

#include <algorithm>
#include <numeric>

#include "operator.h"

namespace draftline {
namespace {

// -1 where there is none.
int64_t highest_bit(const int32_t* words, int64_t num_words) {
  for (int64_t w = num_words - 1; w >= 0; --w) {
    if (words[w] != 0) return 32 * w + 31 - __builtin_clz(static_cast<uint32_t>(words[w]));
  }
  return -1;
}

}  // namespace

void VisibleKeys::derive(const Inputs& inputs, int64_t max_tile_rows) {
  sequences_.clear();
  tiles_.clear();
  rows_.resize(static_cast<size_t>(inputs.num_rows));
  const int32_t* starts = inputs.sequence_starts;
  if (starts[0] != 0 || starts[inputs.num_sequences] != inputs.num_rows) {
    throw Error("sequence_starts: from 0 to the number of rows");
  }
  size_t num_listed = 0;
  int64_t longest = 0;
  for (int64_t b = 0; b < inputs.num_sequences; ++b) {
    const int64_t num_rows = int64_t{starts[b + 1]} - starts[b], context = inputs.context_lengths[b];
    if (num_rows < 1) throw Error("sequence_starts: one row of each sequence at least");
    const int64_t num_used = (context + inputs.block_size - 1) / inputs.block_size;
    if (context < 0 || num_used > inputs.max_blocks) throw Error("block_table: blocks for every committed token");
    const int32_t* blocks = inputs.block_table + b * inputs.max_blocks;
    bool inside = true;
    for (int64_t i = 0; i < num_used; ++i) inside &= blocks[i] >= 0 && blocks[i] < inputs.num_blocks;
    if (!inside) throw Error("block_table: ids of blocks in kv_pool");
    sequences_.push_back({context, blocks, starts[b]});
    longest = std::max(longest, num_rows);
  }
  if (identity_.size() < static_cast<size_t>(longest)) {
    identity_.resize(static_cast<size_t>(longest));
    std::iota(identity_.begin(), identity_.end(), 0);
  }
  depths_.resize(static_cast<size_t>(inputs.num_rows));
  for (const Sequence& sequence : sequences_) {
    const int64_t first = sequence.first_row, end = starts[&sequence - sequences_.data() + 1];
    bool is_chain = true;  // up to here each row attends to all rows before it: nothing to list
    for (int64_t t = first; t < end; ++t) {
      int32_t count = 0;
      const int32_t* words = inputs.packed_mask + t * inputs.num_mask_words;
      for (int64_t w = 0; w < inputs.num_mask_words; ++w) count += __builtin_popcount(static_cast<uint32_t>(words[w]));
      depths_[static_cast<size_t>(t)] = count - 1;
      is_chain = is_chain && count == t - first + 1 && highest_bit(words, inputs.num_mask_words) == t - first;
      rows_[static_cast<size_t>(t)].ancestors = is_chain ? identity_.data() : nullptr;
      if (!is_chain) num_listed += static_cast<size_t>(count);
    }
  }
  if (ancestors_.size() < num_listed) ancestors_.resize(num_listed);  // before rows point into it
  int32_t* free_place = ancestors_.data();
  for (int64_t b = 0; b < inputs.num_sequences; ++b) {
    const int64_t num_rows = starts[b + 1] - starts[b];
    free_place = list_ancestors(inputs, sequences_[static_cast<size_t>(b)], num_rows, free_place);
    cut_tiles(sequences_[static_cast<size_t>(b)], num_rows, max_tile_rows);
  }
}

int32_t* VisibleKeys::list_ancestors(const Inputs& inputs, const Sequence& sequence, int64_t num_rows, int32_t* place) {
  const int32_t* depths = depths_.data() + sequence.first_row;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int32_t* words = inputs.packed_mask + (sequence.first_row + r) * inputs.num_mask_words;
    Row& row = rows_[static_cast<size_t>(sequence.first_row + r)];
    row.end = sequence.context + depths[r] + 1;
    row.begin = inputs.window > 0 ? std::max<int64_t>(0, row.end - inputs.window) : 0;
    if (row.ancestors != nullptr) continue;
    int32_t* list = place;
    row.ancestors = list;
    for (int64_t w = 0; w < inputs.num_mask_words; ++w) {
      for (uint32_t word = static_cast<uint32_t>(words[w]); word != 0; word &= word - 1) {
        const int64_t node = 32 * w + __builtin_ctz(word);
        if (node >= num_rows) throw Error("packed_mask: bits of in-step tokens of the row's own sequence");
        *place++ = static_cast<int32_t>(node);
      }
    }
    const auto shallower = [&](int32_t x, int32_t y) { return depths[x] < depths[y]; };
    if (!std::is_sorted(list, place, shallower)) std::sort(list, place, shallower);
    if (place == list || place[-1] != r) throw Error("packed_mask: a row attends to its ancestors and itself");
  }
  return place;
}

void VisibleKeys::cut_tiles(const Sequence& sequence, int64_t num_rows, int64_t max_tile_rows) {
  for (int64_t r = 0; r < num_rows; r += max_tile_rows) {
    const int64_t count = std::min(max_tile_rows, num_rows - r);
    const Row* rows = rows_.data() + sequence.first_row + r;
    RowTile tile{&sequence, sequence.first_row + r, count, rows[0].begin, rows[0].end, rows[0].begin, rows[0].end};
    for (int64_t i = 1; i < count; ++i) {
      tile.begin = std::min(tile.begin, rows[i].begin);
      tile.end = std::max(tile.end, rows[i].end);
      tile.shared_begin = std::max(tile.shared_begin, rows[i].begin);
      tile.shared_end = std::min(tile.shared_end, rows[i].end);
      const int64_t most = tile.shared_end - sequence.context;
      if (rows[i].ancestors == rows[0].ancestors || most <= 0) continue;
      const auto differ = std::mismatch(rows[0].ancestors, rows[0].ancestors + most, rows[i].ancestors).first;
      tile.shared_end = sequence.context + (differ - rows[0].ancestors);
    }
    if (tile.shared_begin >= tile.shared_end) tile.shared_begin = tile.shared_end = tile.end;
    tiles_.push_back(tile);
  }
}

}  // namespace draftline

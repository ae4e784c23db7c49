#include "tile_attention.h"

#include <algorithm>
#include <cstring>

namespace draftline {
namespace {

constexpr int64_t kChunk = static_cast<int64_t>(kKeyChunk);
constexpr int kKeys = 0, kValues = 1;  // planes of the pool

}  // namespace

TileAttention::TileAttention(const AttentionTensors& tensors, const TilePart& part, float* queries)
    : in_(tensors),
      part_(part),
      tile_(*part.tile),
      size_(static_cast<size_t>(tensors.head_size)),
      stride_(partial_size(size_)),
      queries_(queries) {
  const size_t padded = padded_head_size(size_);
  for (int64_t r = 0; r < tile_.num_rows; ++r) {
    const float* head = in_.q + ((tile_.first_row + r) * in_.num_heads + part.first_head) * in_.head_size;
    for (int64_t h = 0; h < part.num_heads; ++h, head += size_, queries += padded) {
      for (size_t d = 0; d < size_; ++d) queries[d] = head[d] * in_.scale;
      for (size_t d = size_; d < padded; ++d) queries[d] = 0.0f;
    }
  }
}

void TileAttention::compute(int64_t chunk, float* partials) {
  const size_t num_queries = part_.num_queries(), num_heads = static_cast<size_t>(part_.num_heads);
  std::memset(partials, 0, num_queries * stride_ * sizeof(float));
  const Span shared = shared_positions(chunk);
  const Span before{chunk * kChunk, shared.begin}, behind{shared.end, (chunk + 1) * kChunk};
  const size_t count = static_cast<size_t>(shared.end - shared.begin);
  float* shared_scores = scores_ + (shared.begin - chunk * kChunk);

  // What is read next stands behind what is read now, so that it can be fetched meanwhile: the keys of this chunk, its
  // values, the keys of the next. The first keys of all are fetched here.
  const int32_t* ancestors = part_.rows[0].ancestors;
  if (next_keys_ == nullptr) {
    next_keys_ = shared_;
    const void** end = list_keys(shared_, kKeys, ancestors, shared);
    for (const void** key = shared_; key != std::min(end, shared_ + kAhead); ++key) fetch_row(*key);
  } else {
    std::memmove(shared_, next_keys_, count * sizeof(void*));
  }
  next_keys_ = list_keys(shared_ + count, kValues, ancestors, shared);
  const void** end = list_keys(next_keys_, kKeys, ancestors, shared_positions(chunk + 1));
  if (count != 0) std::fill_n(end, kAhead, end[-1]);

  const auto own_scores = [&](size_t query, const void* const* keys, size_t num_keys, int64_t position) {
    float* place = scores_ + query * kKeyChunk + (position - chunk * kChunk);
    in_.scores(queries_ + query * padded_head_size(size_), num_heads, keys, num_keys, 0, size_, place);
  };
  const auto own_values = [&](size_t query, const void* const* values, size_t num_keys, int64_t position) {
    const float* place = scores_ + query * kKeyChunk + (position - chunk * kChunk);
    in_.values(place, num_heads, values, num_keys, 0, size_, partials + query * stride_);
  };
  for_own_keys(before, kKeys, own_scores);
  if (count != 0) in_.scores(queries_, num_queries, shared_, count, kAhead, size_, shared_scores);
  for_own_keys(behind, kKeys, own_scores);
  weigh(chunk, partials);
  for_own_keys(before, kValues, own_values);
  if (count != 0) in_.values(shared_scores, num_queries, shared_ + count, count, kAhead, size_, partials);
  for_own_keys(behind, kValues, own_values);
}

void TileAttention::weigh(int64_t chunk, float* partials) {
  const int64_t first = chunk * kChunk;
  for (int64_t r = 0; r < tile_.num_rows; ++r) {
    const Span own = positions_of(r, {first, first + kChunk});
    if (own.begin >= own.end) continue;
    const size_t begin = static_cast<size_t>(own.begin - first), end = static_cast<size_t>(own.end - first);
    for (int64_t h = 0; h < part_.num_heads; ++h) {
      const size_t query = static_cast<size_t>(r * part_.num_heads + h);
      float* max_and_sum = partials + query * stride_ + padded_head_size(size_);
      in_.kernels->weights(scores_ + query * kKeyChunk, begin, end, in_.softcap, max_and_sum);
    }
  }
}

void TileAttention::finish(const float* totals) const {
  const float* sinks = in_.sinks + part_.first_head;
  for (int64_t r = 0; r < tile_.num_rows; ++r) {
    float* row = in_.out + ((tile_.first_row + r) * in_.num_heads + part_.first_head) * in_.head_size;
    for (int64_t h = 0; h < part_.num_heads; ++h, totals += stride_) {
      in_.kernels->finish(totals, size_, sinks[h], row + h * in_.head_size);
    }
  }
}

TileAttention::Span TileAttention::positions_of(int64_t row, Span limits) const {
  const Row& own = part_.rows[row];
  return {std::max(own.begin, limits.begin), std::min(own.end, limits.end)};
}

void TileAttention::fetch_row(const void* row) const {
  constexpr size_t kLine = 64;
  for (size_t offset = 0; offset < size_ * in_.element_size; offset += kLine) {
    __builtin_prefetch(static_cast<const char*>(row) + offset, 0, 2);
  }
}

// Empty, and then at the begin of the chunk, where the rows share none: all their keys lie behind it.
TileAttention::Span TileAttention::shared_positions(int64_t chunk) const {
  const int64_t first = chunk * kChunk;
  const Span shared{std::max(first, tile_.shared_begin), std::min(first + kChunk, tile_.shared_end)};
  return shared.begin < shared.end ? shared : Span{first, first};
}

// Writes pointers to the rows of `positions` for the key/value head, and returns the place behind them.
const void** TileAttention::list_keys(const void** place, int plane, const int32_t* ancestors, Span positions) const {
  const int64_t context = tile_.sequence->context, block_size = in_.block_size, kv_heads = in_.num_kv_heads;
  const size_t row_size = size_ * in_.element_size;
  int64_t p = positions.begin;
  while (p < std::min(positions.end, context)) {
    const int64_t block = p / block_size, offset = p % block_size;
    const int64_t last = std::min(std::min(positions.end, context), (block + 1) * block_size);
    const int64_t head = (2 * int64_t{tile_.sequence->blocks[block]} + plane) * kv_heads + part_.kv_head;
    const char* row = in_.kv_pool + static_cast<size_t>(head * block_size + offset) * row_size;
    for (int64_t i = 0; i < last - p; ++i) place[i] = row + static_cast<size_t>(i) * row_size;
    place += last - p;
    p = last;
  }
  const char* new_rows = plane == kKeys ? in_.k_new : in_.v_new;
  for (; p < positions.end; ++p) {
    const int64_t row = tile_.sequence->first_row + ancestors[p - context];
    *place++ = new_rows + static_cast<size_t>(row * kv_heads + part_.kv_head) * row_size;
  }
  return place;
}

// Calls function(first query, rows, number of rows, first position) for each row of the tile with keys in `limits`.
template <typename Function>
void TileAttention::for_own_keys(Span limits, int plane, Function function) const {
  if (limits.begin >= limits.end) return;
  for (int64_t r = 0; r < tile_.num_rows; ++r) {
    const Span own = positions_of(r, limits);
    if (own.begin >= own.end) continue;
    const void* rows[kKeyChunk];
    const void** end = list_keys(rows, plane, part_.rows[r].ancestors, own);
    function(static_cast<size_t>(r * part_.num_heads), rows, static_cast<size_t>(end - rows), own.begin);
  }
}

}  // namespace draftline

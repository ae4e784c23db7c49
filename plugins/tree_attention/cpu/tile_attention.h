// Attention of one tile of rows, chunk of keys by chunk of keys.
#pragma once

#include "kernels.h"
#include "visible_keys.h"

namespace draftline {

constexpr size_t kMaxTileQueries = 48;  // their scores and sums stay in the second cache, beside a chunk of keys
constexpr size_t kAhead = 32;           // rows of keys or values fetched ahead of their use

// The tensors of a call. New rows are of the pool's type.
struct AttentionTensors {
  const float* q;
  const char *k_new, *v_new, *kv_pool;
  const float* sinks;
  float* out;
  int64_t num_heads, num_kv_heads, head_size, block_size;
  size_t element_size;
  float scale, softcap;
  const AttentionKernels* kernels;
  AttentionKernels::Scores scores;
  AttentionKernels::Values values;
};

// Query heads `first_head` .. of a tile of rows, all of one key/value head: what is computed together.
struct TilePart {
  const RowTile* tile;
  const Row* rows;
  int64_t kv_head, first_head, num_heads;
  size_t num_queries() const { return static_cast<size_t>(tile->num_rows * num_heads); }
};

class TileAttention {
 public:
  // `queries` takes the queries of the part times the scale, padded_head_size() apart.
  TileAttention(const AttentionTensors& tensors, const TilePart& part, float* queries);

  // Writes the partial of every query of the part: row by row, head by head. Chunk after chunk.
  void compute(int64_t chunk, float* partials);
  // Divides the total of every query into its place of the output.
  void finish(const float* totals) const;

 private:
  struct Span {
    int64_t begin, end;
  };
  Span positions_of(int64_t row, Span limits) const;
  Span shared_positions(int64_t chunk) const;
  const void** list_keys(const void** place, int plane, const int32_t* ancestors, Span positions) const;
  template <typename Function>
  void for_own_keys(Span limits, int plane, Function function) const;
  void fetch_row(const void* row) const;
  void weigh(int64_t chunk, float* partials);

  const AttentionTensors& in_;
  const TilePart& part_;
  const RowTile& tile_;
  size_t size_, stride_;
  float* queries_;
  const void* shared_[3 * kKeyChunk + kAhead];
  const void** next_keys_ = nullptr;  // in shared_, of the chunk behind the last one computed
  alignas(64) float scores_[kMaxTileQueries * kKeyChunk];
};

}  // namespace draftline

// Compiled once per instruction set.
//
// A sum over the inputs has 16 lanes: lane l takes inputs l, l + 16, .. in this order, then the lanes the tree of
// sum(). Nothing else decides a result: not which rows and outputs pass together, nor where the inputs are cut into
// chunks.
#include "kernels.h"
#include "linear_product.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {
namespace {

// The sums of so many rows by a group of outputs stay in registers.
#if defined(__AVX512F__)
constexpr int kRowTile = 6;
#else
constexpr int kRowTile = 1;
#endif
constexpr int kGroup = kOutputGroup;
constexpr int64_t kPanelRows = 64;     // which stay in a core's second cache while weights pass
constexpr int64_t kChunkInputs = 768;  // of a group's weights, which stay in the first cache while rows pass

// Of a row and a group of outputs.
struct Sums {
  F16 a, b, c, d;
};

// Those of a tile. Neither an array nor copied whole: GCC would then keep them in memory.
template <int kRows>
struct TileSums {
  Sums first;
  TileSums<kRows - 1> rest;
};
template <>
struct TileSums<0> {};

// Some inputs of a tile of rows and a group of outputs.
struct Chunk {
  const float* x;
  const float* weights[kGroup];
  int64_t stride, num_inputs;    // from a row to the next, of the chunk
  const float *next, *end_next;  // weights to ask for meanwhile, a stride apart
  bool is_first;                 // of the chunks of inputs
  Sums* sums;                    // one a row: of the chunks before, then of this one too
};

template <int kRows>
[[gnu::always_inline]] inline void load_sums(TileSums<kRows>& sums, const Sums* from) {
  if constexpr (kRows > 0) {
    sums.first.a = from->a;
    sums.first.b = from->b;
    sums.first.c = from->c;
    sums.first.d = from->d;
    load_sums<kRows - 1>(sums.rest, from + 1);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void clear_sums(TileSums<kRows>& sums) {
  if constexpr (kRows > 0) {
    sums.first.a = sums.first.b = sums.first.c = sums.first.d = set(0.0f);
    clear_sums<kRows - 1>(sums.rest);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void write_sums(const TileSums<kRows>& sums, Sums* to) {
  if constexpr (kRows > 0) {
    to->a = sums.first.a;
    to->b = sums.first.b;
    to->c = sums.first.c;
    to->d = sums.first.d;
    write_sums<kRows - 1>(sums.rest, to + 1);
  }
}

template <int kRows>
[[gnu::always_inline]] inline void add_to_rows(TileSums<kRows>& sums, const float* x, int64_t stride, F16 w0, F16 w1,
                                               F16 w2, F16 w3, int count) {
  if constexpr (kRows > 0) {
    F16 inputs = load_first(x, count);
    keep(inputs);
    sums.first.a = fma(inputs, w0, sums.first.a);
    sums.first.b = fma(inputs, w1, sums.first.b);
    sums.first.c = fma(inputs, w2, sums.first.c);
    sums.first.d = fma(inputs, w3, sums.first.d);
    add_to_rows<kRows - 1>(sums.rest, x + stride, stride, w0, w1, w2, w3, count);
  }
}

// The products of inputs d .. d + count - 1.
template <int kRows>
[[gnu::always_inline]] inline void add_products(TileSums<kRows>& sums, const Chunk& c, int64_t d, int count) {
  F16 w0 = load_first(c.weights[0] + d, count), w1 = load_first(c.weights[1] + d, count);
  F16 w2 = load_first(c.weights[2] + d, count), w3 = load_first(c.weights[3] + d, count);
  keep(w0);
  keep(w1);
  keep(w2);
  keep(w3);
  add_to_rows<kRows>(sums, c.x + d, c.stride, w0, w1, w2, w3, count);
}

template <int kRows>
void multiply_tile(const Chunk& c) {
  TileSums<kRows> sums;
  if (c.is_first) {
    clear_sums<kRows>(sums);
  } else {
    load_sums<kRows>(sums, c.sums);
  }
  int64_t d = 0;
  for (; d + kLanes <= c.num_inputs; d += kLanes) {
    for (const float* p = c.next; p != c.end_next; p += c.stride) prefetch_far(p + d);
    add_products<kRows>(sums, c, d, kLanes);
  }
  if (d < c.num_inputs) add_products<kRows>(sums, c, d, static_cast<int>(c.num_inputs - d));
  write_sums<kRows>(sums, c.sums);
}

template <int kRows>
void multiply_tile(const Chunk& c, int num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_tile<kRows - 1>(c, num_rows);
  }
  multiply_tile<kRows>(c);
}

// Sums of a tile, and where each one's sum over its lanes goes.
struct Results {
  const Sums* sums;
  float* y;
  int num_rows, num_outputs;
};

inline void store_results(const Sums& s, float* y, int num_outputs) {
  if (num_outputs == kGroup) return store_sums(y, s.a, s.b, s.c, s.d);
  float four[kGroup];
  store_sums(four, s.a, s.b, s.c, s.d);
  for (int j = 0; j < num_outputs; ++j) y[j] = four[j];
}

inline void store_results(const Results& results, int64_t y_stride) {
  float* y = results.y;
  for (int r = 0; r < results.num_rows; ++r, y += y_stride) store_results(results.sums[r], y, results.num_outputs);
}

// Up to kPanelRows rows, and a group of outputs from `output` on. Stores the results `last`, and returns those of its
// own last tile: sums over lanes are formed a tile later, when they wait for nothing and hold no products up. `memory`:
// of sums, two tiles in turn, or with several chunks a panel.
Results multiply_group(const LinearProduct& p, int64_t first_row, int num_rows, int64_t output, Results last,
                       Sums* memory) {
  const int num_tiles = (num_rows + kRowTile - 1) / kRowTile;
  const bool is_whole = p.num_inputs <= kChunkInputs;
  Chunk c;
  c.stride = p.num_inputs;
  const int num_outputs = static_cast<int>(p.num_outputs - output < kGroup ? p.num_outputs - output : kGroup);
  for (int64_t first = 0; first < p.num_inputs; first += kChunkInputs) {
    const int64_t end = first + kChunkInputs < p.num_inputs ? first + kChunkInputs : p.num_inputs;
    c.num_inputs = end - first;
    c.is_first = first == 0;
    const bool is_last = end == p.num_inputs;
    for (int j = 0; j < kGroup; ++j) {
      const int64_t row = output + (j < num_outputs ? j : num_outputs - 1);
      c.weights[j] = p.weight + row * c.stride + first;
    }
    // The tiles share in asking for the next weights, so that reading goes on while products are formed.
    const float* next = is_last ? p.weight + (output + kGroup) * c.stride : c.weights[0] + kChunkInputs;
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int count = (num_rows - row) / (num_tiles - tile);  // tiles differ by a row at most
      c.x = p.x + (first_row + row) * c.stride + first;
      float* y = p.y + (first_row + row) * p.y_stride + output;
      if (is_last) {
        for (int r = 0; r < count; ++r) prefetch(y + r * p.y_stride);
      }
      c.sums = is_whole ? (last.sums == memory ? memory + kRowTile : memory) : memory + row;
      c.next = next + kGroup * tile / num_tiles * c.stride;
      c.end_next = next + kGroup * (tile + 1) / num_tiles * c.stride;
      multiply_tile<kRowTile>(c, count);
      if (is_last) {
        store_results(last, p.y_stride);
        last = {c.sums, y, count, num_outputs};
      }
      row += count;
    }
  }
  if (is_whole) return last;
  store_results(last, p.y_stride);
  return {};
}

// One row reads its weights once and does little else: in the order in which they lie they come the fastest.
void multiply_one_row(const LinearProduct& p) {
  for (int64_t output = 0; output < p.num_outputs; output += kGroup) {
    const int num_outputs = static_cast<int>(p.num_outputs - output < kGroup ? p.num_outputs - output : kGroup);
    F16 sums[kGroup];
    for (int j = 0; j < kGroup; ++j) {
      const float* weights = p.weight + (output + (j < num_outputs ? j : num_outputs - 1)) * p.num_inputs;
      F16 sum = set(0.0f);
      int64_t d = 0;
      for (; d + kLanes <= p.num_inputs; d += kLanes) sum = fma(load(p.x + d), load(weights + d), sum);
      if (const int count = static_cast<int>(p.num_inputs - d); count > 0) {
        sum = fma(load_first(p.x + d, count), load_first(weights + d, count), sum);
      }
      sums[j] = sum;
    }
    store_results(Sums{sums[0], sums[1], sums[2], sums[3]}, p.y + output, num_outputs);
  }
}

}  // namespace

void multiply_rows(const LinearProduct& p) {
  if (p.num_rows == 1) return multiply_one_row(p);
  Sums memory[kPanelRows];
  Results last{};
  for (int64_t row = 0; row < p.num_rows; row += kPanelRows) {
    const int num_rows = static_cast<int>(p.num_rows - row < kPanelRows ? p.num_rows - row : kPanelRows);
    for (int64_t output = 0; output < p.num_outputs; output += kGroup) {
      last = multiply_group(p, row, num_rows, output, last, memory);
    }
  }
  store_results(last, p.y_stride);
}

}  // namespace draftline::DRAFTLINE_ISA

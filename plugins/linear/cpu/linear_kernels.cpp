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

// Those of a tile. No array: GCC would keep a copy of it in memory.
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
  int64_t stride, num_inputs;  // of a row, of the chunk
  const float* next[kGroup];   // weights to ask for meanwhile, those from first_next to end_next - 1
  int first_next, end_next;
  Sums* sums;              // of the chunks before, and then of this one too; one a row
  bool is_first, is_last;  // of the chunks of inputs
  float* y;                // written with the last one
  int64_t y_stride, num_outputs;
};

template <int kRows>
inline void begin(TileSums<kRows>& sums, const Chunk& c, const Sums* from, const float* y) {
  if constexpr (kRows > 0) {
    if (c.is_last) prefetch(y);
    const F16 zero = set(0.0f);
    sums.first = c.is_first ? Sums{zero, zero, zero, zero} : *from;
    begin<kRows - 1>(sums.rest, c, from + 1, y + c.y_stride);
  }
}

template <int kRows, typename Load>
inline void add_products(TileSums<kRows>& sums, const float* x, int64_t stride, const Sums& weights, Load load_inputs) {
  if constexpr (kRows > 0) {
    F16 inputs = load_inputs(x);
    keep(inputs);
    sums.first.a = fma(inputs, weights.a, sums.first.a);
    sums.first.b = fma(inputs, weights.b, sums.first.b);
    sums.first.c = fma(inputs, weights.c, sums.first.c);
    sums.first.d = fma(inputs, weights.d, sums.first.d);
    add_products<kRows - 1>(sums.rest, x + stride, stride, weights, load_inputs);
  }
}

template <int kRows>
inline void end(const TileSums<kRows>& sums, const Chunk& c, Sums* to, float* y) {
  if constexpr (kRows > 0) {
    const auto& [s0, s1, s2, s3] = sums.first;
    if (!c.is_last) {
      *to = sums.first;
    } else if (c.num_outputs == kGroup) {
      store_sums(y, s0, s1, s2, s3);
    } else {
      float four[kGroup];
      store_sums(four, s0, s1, s2, s3);
      for (int64_t j = 0; j < c.num_outputs; ++j) y[j] = four[j];
    }
    end<kRows - 1>(sums.rest, c, to + 1, y + c.y_stride);
  }
}

template <int kRows>
void multiply_tile(const Chunk& c) {
  TileSums<kRows> sums;
  begin<kRows>(sums, c, c.sums, c.y);
  const auto [w0, w1, w2, w3] = c.weights;
  const auto add = [&](int64_t d, auto load_inputs) {
    Sums w{load_inputs(w0 + d), load_inputs(w1 + d), load_inputs(w2 + d), load_inputs(w3 + d)};
    keep(w.a);
    keep(w.b);
    keep(w.c);
    keep(w.d);
    add_products<kRows>(sums, c.x + d, c.stride, w, load_inputs);
  };
  int64_t d = 0;
  for (; d + kLanes <= c.num_inputs; d += kLanes) {
    for (int j = c.first_next; j < c.end_next; ++j) prefetch_far(c.next[j] + d);
    add(d, [](const float* p) { return load(p); });
  }
  if (d < c.num_inputs) {
    add(d, [rest = static_cast<int>(c.num_inputs - d)](const float* p) { return load_first(p, rest); });
  }
  end<kRows>(sums, c, c.sums, c.y);
}

template <int kRows>
void multiply_tile(const Chunk& c, int num_rows) {
  if constexpr (kRows > 1) {
    if (num_rows < kRows) return multiply_tile<kRows - 1>(c, num_rows);
  }
  multiply_tile<kRows>(c);
}

// Up to kPanelRows rows, and a group of outputs from `output` on.
void multiply_group(const LinearProduct& p, int64_t first_row, int num_rows, int64_t output) {
  const int num_tiles = (num_rows + kRowTile - 1) / kRowTile;
  Sums memory[kPanelRows];
  Chunk c;
  c.stride = p.num_inputs;
  c.y_stride = p.y_stride;
  c.num_outputs = p.num_outputs - output < kGroup ? p.num_outputs - output : kGroup;
  for (int64_t first = 0; first < p.num_inputs; first += kChunkInputs) {
    const int64_t last = first + kChunkInputs < p.num_inputs ? first + kChunkInputs : p.num_inputs;
    c.num_inputs = last - first;
    c.is_first = first == 0;
    c.is_last = last == p.num_inputs;
    for (int j = 0; j < kGroup; ++j) {
      const int64_t row = output + (j < c.num_outputs ? j : c.num_outputs - 1);
      c.weights[j] = p.weight + row * c.stride + first;
      c.next[j] = c.is_last ? p.weight + (row + kGroup) * c.stride : c.weights[j] + kChunkInputs;
    }
    int row = 0;
    for (int tile = 0; tile < num_tiles; ++tile) {
      const int count = (num_rows - row) / (num_tiles - tile);  // tiles differ by a row at most
      c.x = p.x + (first_row + row) * c.stride + first;
      c.y = p.y + (first_row + row) * p.y_stride + output;
      c.sums = memory + row;
      c.first_next = kGroup * tile / num_tiles;
      c.end_next = kGroup * (tile + 1) / num_tiles;
      multiply_tile<kRowTile>(c, count);
      row += count;
    }
  }
}

}  // namespace

void multiply_rows(const LinearProduct& p) {
  for (int64_t row = 0; row < p.num_rows; row += kPanelRows) {
    const int num_rows = static_cast<int>(p.num_rows - row < kPanelRows ? p.num_rows - row : kPanelRows);
    for (int64_t output = 0; output < p.num_outputs; output += kGroup) multiply_group(p, row, num_rows, output);
  }
}

}  // namespace draftline::DRAFTLINE_ISA

// What the kernels of quantised products work on. No C++ but constants and a plain struct: see kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace draftline {

constexpr int64_t kTileOutputs = 16, kBlockInputs = 32;
constexpr int64_t kGroupRows = 8;               // rows that pass a tile together
constexpr int64_t kRowBlockBytes = 32 + 4 + 4;  // of a quantised row: 32 inputs, their scale, their sum's offset
constexpr float kLeastInput = 1e-30f;           // a block of smaller ones counts as zeros

// A tile of outputs times the rows of a group, which lie as quantize_rows() writes them.
struct TileProduct {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;  // null with 8 bits
  const uint8_t* rows;
  int64_t num_blocks, num_rows;
  int64_t num_outputs;  // of the tile, without those that pad it
  float* y;
  int64_t y_stride;
  const uint8_t* prefetch;  // memory to ask for, so many bytes with each block
  int64_t prefetch_step;
  bool prefetches_far;  // into the second cache, not the first
};

}  // namespace draftline

// A matrix of 8 or 4 bits and the quantised rows that it multiplies, cut into pieces of work.
#pragma once

#include <cstdint>

#include "scratch.h"

namespace draftline {

constexpr int64_t kSerialInputs = 16 << 10;  // as many inputs are quantised before a second thread has woken

// Bytes of a quantised row.
int64_t quantized_row_bytes(int64_t num_inputs);

// Quantises the rows x [num_rows, num_inputs] of a group for products with `bits`.
void quantize_group(const float* x, int64_t num_rows, int64_t num_inputs, int64_t bits, uint8_t* out);

struct QuantizedProduct {
  const uint8_t* codes;
  const float* scales;
  const uint8_t* zeros;  // null with 8 bits
  const uint8_t* rows;   // in groups of kGroupRows, one behind the other, each as quantize_group() writes it
  int64_t bits, num_rows, num_inputs, num_outputs;

  int64_t num_tiles() const;
  int64_t piece_tiles() const;  // of a piece, the last one excepted
  int64_t num_pieces() const { return ceil_div(num_tiles(), piece_tiles()); }

  // The products of a piece, of all rows: `y` is where the first row's of its first tile goes.
  void multiply_piece(int64_t index, float* y, int64_t y_stride) const;
};

}  // namespace draftline

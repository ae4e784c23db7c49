// What the kernel of float32 products works on. No C++ but constants and a plain struct: see kernels.h.
#pragma once

#include <cstdint>

namespace draftline {

constexpr int64_t kOutputGroup = 4;  // outputs whose weights pass the rows together

// Rows x [num_rows, num_inputs] times some outputs' weights [num_outputs, num_inputs], both as they lie in memory.
struct LinearProduct {
  const float* x;
  const float* weight;
  int64_t num_rows, num_inputs, num_outputs;
  float* y;
  int64_t y_stride;
};

}  // namespace draftline

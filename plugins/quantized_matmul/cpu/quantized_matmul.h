// Products with, and lookups in, matrices of 8 or 4 bits. Formula and layouts: quantized_matmul/README.md.
#pragma once

#include "operator.h"

namespace draftline {

// QuantizedMatMul(x [T, in], codes, scales[, zeros]) -> y [T, out].
struct QuantizedMatMul {
  static constexpr const char* kName = "QuantizedMatMul";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kUint8, ort::kFloat, ort::kUint8};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 3;

  explicit QuantizedMatMul(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t bits_, num_inputs_, num_outputs_;
};

// QuantizedEmbedding(codes, scales of 8 bits, ids [T]) -> rows [T, in].
struct QuantizedEmbedding {
  static constexpr const char* kName = "QuantizedEmbedding";
  static constexpr ort::ElementType kInputs[] = {ort::kUint8, ort::kFloat, ort::kInt32};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 3;

  explicit QuantizedEmbedding(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t num_inputs_;
};

}  // namespace draftline

// Products with matrices of 8 or 4 bits of which each row chooses one. Formula and layouts: quantized_matmul/README.md.
#pragma once

#include "operator.h"

namespace draftline {

// ChosenQuantizedMatMul(x [R, in], ids [N], codes, scales[, zeros]) -> y [N, out], N a multiple of R: as ChosenLinear,
// of matrices one behind the other.
class ChosenQuantizedMatMul {
 public:
  static constexpr const char* kName = "ChosenQuantizedMatMul";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kInt64, ort::kUint8, ort::kFloat, ort::kUint8};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 4;

  explicit ChosenQuantizedMatMul(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t bits_, num_inputs_, num_outputs_;
};

}  // namespace draftline

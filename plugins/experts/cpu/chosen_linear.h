// Products with matrices of float32 of which each row chooses one.
#pragma once

#include "operator.h"

namespace draftline {

// ChosenLinear(x [R, in], ids [N], weight [matrices, out, in]) -> y [N, out], N a multiple of R: row n of y is row
// n / (N / R) of x times the transpose of weight[ids[n]].
struct ChosenLinear {
  static constexpr const char* kName = "ChosenLinear";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kInt64, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 3;

  explicit ChosenLinear(const Attributes&) {}
  void compute(Call& call) const;
};

}  // namespace draftline

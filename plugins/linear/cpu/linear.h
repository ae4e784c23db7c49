// Products with matrices of float32, which are read where they lie.
#pragma once

#include "operator.h"

namespace draftline {

// Linear(x [T, in], weight [out, in]) -> y [T, out]: x times the transpose of weight.
struct Linear {
  static constexpr const char* kName = "Linear";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 2;

  explicit Linear(const Attributes&) {}
  void compute(Call& call) const;
};

// Outputs of a piece of work: of a product of so many rows.
int64_t outputs_of_piece(int64_t num_rows, int64_t num_inputs);

}  // namespace draftline

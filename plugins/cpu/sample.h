// What ends a graph: the token drawn from each row of logits, and the most probable tokens of each row.
#pragma once

#include "operator.h"

namespace draftline {

// Sample(logits [R, V], temperature, top_k, top_p, uniform [R], edit_rows, edit_token_ids, edit_bias, edit_divisor,
// edit_offset [E]) -> ids [R]; -1 where a row holds no distribution: with NaN, inf, or nothing above -inf.
struct Sample {
  static constexpr const char* kName = "Sample";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kInt32, ort::kFloat, ort::kFloat,
                                                 ort::kInt32, ort::kInt32, ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kInt64};
  static constexpr size_t kNumRequired = 5;

  explicit Sample(const Attributes&) {}
  void compute(Call& call) const;
};

// TopCandidates(logits [R, V]) -> ids, log_probs [R, num_candidates]: the most probable first, of equal ones the lower
// id first. A row that holds no distribution gives the first tokens, each of probability 0.
struct TopCandidates {
  static constexpr const char* kName = "TopCandidates";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kInt64, ort::kFloat};
  static constexpr size_t kNumRequired = 1;

  explicit TopCandidates(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t num_candidates_;
};

}  // namespace draftline

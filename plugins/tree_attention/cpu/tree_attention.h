// TreeAttention over a paged pool that is read in place; the contract is ../README.md.
#pragma once

#include "operator.h"

namespace draftline {

class TreeAttention {
 public:
  static constexpr const char* kName = "TreeAttention";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat, ort::kUndefined, ort::kInt32,
                                                 ort::kInt32, ort::kInt32, ort::kInt32, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 9;

  explicit TreeAttention(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t num_heads_, num_kv_heads_, head_size_, block_size_, window_;
  float scale_, softcap_;
};

}  // namespace draftline

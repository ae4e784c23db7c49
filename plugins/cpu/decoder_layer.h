// Elementwise operators of a decoder layer, each one pass over memory.
#pragma once

#include "operator.h"

namespace draftline {

// SiluGate(both [T, 2 F]) -> out [T, F]: silu(both[:, :F]) * both[:, F:].
struct SiluGate {
  static constexpr const char* kName = "SiluGate";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 1;

  explicit SiluGate(const Attributes&) {}
  void compute(Call& call) const;
};

}  // namespace draftline

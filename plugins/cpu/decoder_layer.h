// Operators of a decoder layer that are one pass over memory.
#pragma once

#include "operator.h"

namespace draftline {

// SiluGate(both [T, 2 F]) -> out [T, F]: silu(both[:, :F]) * both[:, F:]; with up_first silu is of the second half.
class SiluGate {
 public:
  static constexpr const char* kName = "SiluGate";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 1;

  explicit SiluGate(const Attributes& attributes) : up_first_(attributes.flag("up_first")) {}
  void compute(Call& call) const;

 private:
  bool up_first_;
};

// GeluGate(both [T, 2 F]) -> out [T, F]: gelu(both[:, :F]) * both[:, F:]; of GELU its approximation by tanh.
struct GeluGate {
  static constexpr const char* kName = "GeluGate";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static constexpr size_t kNumRequired = 1;

  explicit GeluGate(const Attributes&) {}
  void compute(Call& call) const;
};

// AddNorm(x, y [T, size], weight [size]) -> sum [T, size]: x + y; normed [T, size]: sum * weight / rms(sum).
class AddNorm {
 public:
  static constexpr const char* kName = "AddNorm";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat};
  static constexpr size_t kNumRequired = 3;

  explicit AddNorm(const Attributes& attributes) : epsilon_(attributes.real("epsilon")) {}
  void compute(Call& call) const;

 private:
  float epsilon_;
};

// RotatedHeads(qkv [T, (H + 2 K) D], cosines, sines [positions, half], position_ids [T], q_norm, k_norm [D])
// -> q [T, H, D], k, v [T, K, D]. Element i < half of a head is rotated with element i + half; 2 half is D at most.
class RotatedHeads {
 public:
  static constexpr const char* kName = "RotatedHeads";
  static constexpr ort::ElementType kInputs[] = {ort::kFloat, ort::kFloat, ort::kFloat,
                                                 ort::kInt32, ort::kFloat, ort::kFloat};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
  static constexpr size_t kNumRequired = 4;

  explicit RotatedHeads(const Attributes& attributes);
  void compute(Call& call) const;

 private:
  int64_t num_heads_, num_kv_heads_, size_;
  float epsilon_;
};

}  // namespace draftline

// What operators cut work and keep memory with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace draftline {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory that calls of a thread share: it grows to what the largest one needs.
class Scratch {
 public:
  uint8_t* get(size_t num_bytes) {
    if (memory_.size() < num_bytes + kAlignment) memory_.resize(num_bytes + kAlignment);
    return memory_.data() + -reinterpret_cast<uintptr_t>(memory_.data()) % kAlignment;
  }

 private:
  static constexpr size_t kAlignment = 64;
  std::vector<uint8_t> memory_;
};

}  // namespace draftline

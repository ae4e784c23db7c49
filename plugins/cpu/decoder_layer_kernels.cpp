// Compiled once per instruction set.
#include "kernels.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {

void silu_gate(const float* gate, const float* up, float* out, size_t count) {
  const F16 one = set(1.0f);
  for (size_t i = 0; i < count; i += kLanes) {
    const int n = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    const F16 g = load_first(gate + i, n);
    const F16 sigmoid = div(one, add(one, exp(sub(set(0.0f), g))));
    store_first(out + i, mul(mul(g, sigmoid), load_first(up + i, n)), n);
  }
}

}  // namespace draftline::DRAFTLINE_ISA

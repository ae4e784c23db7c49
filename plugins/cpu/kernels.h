// The kernels of one instruction set: plain functions, so that a caller compiled for any processor can call them.
//
// Files compiled for an instruction set include this, simd.h and headers of C alone: an inline function of C++ that
// they share with other files could be linked in their form, and fail on processors that lack the instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace draftline {

struct Kernels {
  const char* name;  // "avx512_vnni", "avx2", "neon"

  // out[i] = silu(gate[i]) * up[i].
  void (*silu_gate)(const float* gate, const float* up, float* out, size_t count);

  // total = x + y, normed = total * weight / rms(total).
  void (*add_norm)(const float* x, const float* y, size_t size, const float* weight, float epsilon, float* total,
                   float* normed);

  // Rotates heads of `2 * half` elements: out[i] = x[i] cosines[i] - x[i + half] sines[i], out[i + half] = x[i + half]
  // cosines[i] + x[i] sines[i]. x is a head, or its RMS norm where there is a norm_weight.
  void (*rotate_heads)(const float* heads, size_t num_heads, size_t half, const float* cosines, const float* sines,
                       const float* norm_weight, float epsilon, float* out);
};

// The best kernels that this processor runs, or those that use_kernels() chose; null where it runs none.
const Kernels* kernels();

// Each defined in the files compiled for that instruction set.
#if defined(__x86_64__)
namespace avx512_vnni {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kKernels;
}
#endif

}  // namespace draftline

#if defined(DRAFTLINE_ISA)
namespace draftline::DRAFTLINE_ISA {
void silu_gate(const float* gate, const float* up, float* out, size_t count);
void add_norm(const float* x, const float* y, size_t size, const float* weight, float epsilon, float* total,
              float* normed);
void rotate_heads(const float* heads, size_t num_heads, size_t half, const float* cosines, const float* sines,
                  const float* norm_weight, float epsilon, float* out);
}  // namespace draftline::DRAFTLINE_ISA
#endif

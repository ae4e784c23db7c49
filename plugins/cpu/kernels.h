// The kernels of one instruction set: plain functions, so that a caller compiled for any processor can call them.
//
// Files compiled for an instruction set include this, simd.h and headers of C alone: an inline function of C++ that
// they share with other files could be linked in their form, and fail on processors that lack the instructions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_kernels.h"

namespace draftline {

// Logits are looked at in blocks of so many; the last one may be shorter.
constexpr size_t kLogitBlock = 64;

// The weight of a logit: e^((logit - largest) * inverse_temperature) from `floor` on, 0 below it, and 0 below e^-87.
struct Softmax {
  float largest, inverse_temperature, floor;
};

struct TileProduct;    // quantized_matmul/cpu/tile_product.h
struct LinearProduct;  // linear/cpu/linear_product.h

// The bucket of x: 1 + (high * unit - x * unit) * scale without its fraction from `low` to `high`, 0 outside. `unit` is
// a power of two that keeps the differences of float32 numbers of any size representable.
struct Buckets {
  float low, high, unit, scale;
};

struct Kernels {
  const char* name;  // "avx512_vnni", "avx2", "neon_dotprod", "neon"

  // out[i] = silu(gate[i]) * up[i].
  void (*silu_gate)(const float* gate, const float* up, float* out, size_t count);

  // out[i] = gelu(gate[i]) * up[i]; gelu(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), its approximation by tanh.
  void (*gelu_gate)(const float* gate, const float* up, float* out, size_t count);

  // total = x + y, normed = total * weight / rms(total).
  void (*add_norm)(const float* x, const float* y, size_t size, const float* weight, float epsilon, float* total,
                   float* normed);

  // Rotates the first `2 * half` elements of heads of `size`: out[i] = x[i] cosines[i] - x[i + half] sines[i],
  // out[i + half] = x[i + half] cosines[i] + x[i] sines[i]; out is x behind them. x is a head, or its RMS norm where
  // there is a norm_weight.
  void (*rotate_heads)(const float* heads, size_t num_heads, size_t size, size_t half, const float* cosines,
                       const float* sines, const float* norm_weight, float epsilon, float* out);

  // maxima[i] = the largest logit of block i. Returns a sum of all logits: NaN where one is.
  float (*block_maxima)(const float* logits, size_t count, float* maxima);

  // weights[i] = the weight of logit i of one block.
  void (*block_weights)(const float* logits, size_t count, const Softmax& softmax, float* weights);

  // buckets[i] = the bucket of logit i of one block.
  void (*block_buckets)(const float* logits, size_t count, const Buckets& range, int32_t* buckets);

  // masses[i] = the sum of the weights of block i, given its maximum.
  void (*block_masses)(const float* logits, size_t count, const Softmax& softmax, const float* maxima, double* masses);

  // Quantises the rows x [num_rows, num_inputs] of a group; out: [blocks, num_rows, kRowBlockBytes].
  void (*quantize_rows)(const float* x, int64_t num_rows, int64_t num_inputs, int32_t zero_point, uint8_t* out);
  void (*multiply_tile_8)(const TileProduct& product);
  void (*multiply_tile_4)(const TileProduct& product);

  // y = x times the transpose of the weights.
  void (*multiply_rows)(const LinearProduct& product);

  const AttentionKernels* attention;
};

// The best kernels that this processor runs, or those that draftline_use_instruction_set() chose; null where it runs
// none.
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
namespace neon_dotprod {
extern const Kernels kKernels;
}
namespace neon {
extern const Kernels kKernels;
}
#endif

}  // namespace draftline

#if defined(DRAFTLINE_ISA)
namespace draftline::DRAFTLINE_ISA {
void silu_gate(const float* gate, const float* up, float* out, size_t count);
void gelu_gate(const float* gate, const float* up, float* out, size_t count);
void add_norm(const float* x, const float* y, size_t size, const float* weight, float epsilon, float* total,
              float* normed);
void rotate_heads(const float* heads, size_t num_heads, size_t size, size_t half, const float* cosines,
                  const float* sines, const float* norm_weight, float epsilon, float* out);
float block_maxima(const float* logits, size_t count, float* maxima);
void block_weights(const float* logits, size_t count, const Softmax& softmax, float* weights);
void block_buckets(const float* logits, size_t count, const Buckets& range, int32_t* buckets);
void block_masses(const float* logits, size_t count, const Softmax& softmax, const float* maxima, double* masses);
void quantize_rows(const float* x, int64_t num_rows, int64_t num_inputs, int32_t zero_point, uint8_t* out);
void multiply_tile_8(const TileProduct& product);
void multiply_tile_4(const TileProduct& product);
void multiply_rows(const LinearProduct& product);
}  // namespace draftline::DRAFTLINE_ISA
#endif

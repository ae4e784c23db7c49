// Compiled once per instruction set: its table of kernels.
#include "kernels.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {

#define DRAFTLINE_TEXT_OF(name) #name
#define DRAFTLINE_NAME(name) DRAFTLINE_TEXT_OF(name)

extern const Kernels kKernels;
// clang-format off
const Kernels kKernels = {
    DRAFTLINE_NAME(DRAFTLINE_ISA),
    silu_gate,
    gelu_gate,
    add_norm,
    rotate_heads,
    block_maxima,
    block_weights,
    block_buckets,
    block_masses,
    quantize_rows,
    multiply_tile_8,
    multiply_tile_4,
    multiply_rows,
    &kAttention,
};
// clang-format on

}  // namespace draftline::DRAFTLINE_ISA

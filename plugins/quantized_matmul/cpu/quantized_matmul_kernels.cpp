// Compiled once per instruction set.
#include "int8_lanes.h"
#include "kernels.h"
#include "simd.h"
#include "tile_product.h"

namespace draftline::DRAFTLINE_ISA {
namespace {

// A block of a row: 32 inputs of 8 bits, their scale, and their sum times minus `zero_point`. The scale is NaN where an
// input is not finite.
void quantize_block(const float* x, int count, int zero_point, uint8_t* out) {
  const int low_count = count < kLanes ? count : kLanes;
  F16 low = load_first(x, low_count), high = load_first(x + low_count, count - low_count);
  const float greatest = largest_size(low, high);
  const bool is_zero = !(greatest >= kLeastInput);
  float scale = is_zero ? 0.0f : greatest / 127.0f;
  const F16 inverse = set(is_zero ? 0.0f : 127.0f / greatest);
  if (!(greatest < INFINITY)) {
    scale = NAN;
    low = high = set(0.0f);
  }
  auto* inputs = reinterpret_cast<int8_t*>(out);
  int32_t total = store_rounded(inputs, mul(low, inverse));
  total += store_rounded(inputs + kLanes, mul(high, inverse));
  total *= -zero_point;
  std::memcpy(out + kBlockInputs, &scale, sizeof(scale));
  std::memcpy(out + kBlockInputs + sizeof(scale), &total, sizeof(total));
}

template <typename T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// `rows`: the first of kRows rows of the group's first block.
template <int kBits, int kRows>
void multiply_rows(const TileProduct& p, int64_t first_row) {
  F16 y[kRows];
  for (auto& row : y) row = set(0.0f);
  const uint8_t* rows = p.rows + first_row * kRowBlockBytes;
  const uint8_t* codes = p.codes;
  const uint8_t* prefetched = p.prefetch;
  for (int64_t block = 0; block < p.num_blocks; ++block) {
    if (p.prefetches_far) {
      for (int64_t i = 0; i < p.prefetch_step; i += 64) prefetch_far(prefetched + i);
    } else {
      for (int64_t i = 0; i < p.prefetch_step; i += 64) prefetch(prefetched + i);
    }
    Dots<kBits> dots[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int32_t offset = read<int32_t>(rows + r * kRowBlockBytes + kBlockInputs + sizeof(float));
      dots[r].begin(offset, kBits == 4 ? p.zeros + block * kTileOutputs : nullptr);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kBits; ++i) {
      const Codes loaded = load_codes(codes + 64 * i);
      const auto* inputs = reinterpret_cast<const int8_t*>(rows);
      if constexpr (kBits == 8) {
        const Codes four = operand<8>(loaded);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) dots[r].add(four, inputs + r * kRowBlockBytes + 4 * i);
      } else {
        const Codes even = low_halves(loaded), odd = high_halves(loaded);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          dots[r].add(even, inputs + r * kRowBlockBytes + 8 * i);
          dots[r].add(odd, inputs + r * kRowBlockBytes + 8 * i + 4);
        }
      }
    }
    const F16 scales = load(p.scales + block * kTileOutputs);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F16 scale = mul(scales, set(read<float>(rows + r * kRowBlockBytes + kBlockInputs)));
      y[r] = fma(dots[r].sums(), scale, y[r]);
    }
    codes += kBits * 64;
    prefetched += p.prefetch_step;
    rows += p.num_rows * kRowBlockBytes;
  }
  for (int r = 0; r < kRows; ++r)
    store_first(p.y + (first_row + r) * p.y_stride, y[r], static_cast<int>(p.num_outputs));
}

template <int kBits, int kRows>
void multiply_last_rows(const TileProduct& p, int64_t first_row) {
  if (p.num_rows - first_row == kRows) return multiply_rows<kBits, kRows>(p, first_row);
  if constexpr (kRows > 1) multiply_last_rows<kBits, kRows - 1>(p, first_row);
}

template <int kBits>
void multiply_tile(const TileProduct& p) {
  int64_t row = 0;
  for (; p.num_rows - row > kRowsAtOnce; row += kRowsAtOnce) multiply_rows<kBits, kRowsAtOnce>(p, row);
  multiply_last_rows<kBits, kRowsAtOnce>(p, row);
}

}  // namespace

void quantize_rows(const float* x, int64_t num_rows, int64_t num_inputs, int32_t zero_point, uint8_t* out) {
  for (int64_t first = 0; first < num_inputs; first += kBlockInputs) {
    const int64_t rest = num_inputs - first;
    const int count = static_cast<int>(rest < kBlockInputs ? rest : kBlockInputs);
    for (int64_t r = 0; r < num_rows; ++r, out += kRowBlockBytes)
      quantize_block(x + r * num_inputs + first, count, zero_point, out);
  }
}

void multiply_tile_8(const TileProduct& product) { multiply_tile<8>(product); }
void multiply_tile_4(const TileProduct& product) { multiply_tile<4>(product); }

}  // namespace draftline::DRAFTLINE_ISA

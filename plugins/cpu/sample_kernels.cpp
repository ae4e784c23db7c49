// Compiled once per instruction set.
#include "kernels.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {
namespace {

constexpr int kVectors = kLogitBlock / kLanes;

struct Block {
  F16 v[kVectors];
};

// The first `count` of a block, 1 at least; the others are -inf.
inline Block load_block(const float* logits, size_t count) {
  if (count >= kLogitBlock) {
    Block block;
    for (int i = 0; i < kVectors; ++i) block.v[i] = load(logits + i * kLanes);
    return block;
  }
  float padded[kLogitBlock];
  for (size_t i = 0; i < kLogitBlock; ++i) padded[i] = i < count ? logits[i] : -INFINITY;
  return load_block(padded, kLogitBlock);
}

inline F16 weight(F16 x, const Softmax& softmax) {
  const F16 lowest = set(-87.0f);
  const F16 scaled = mul(sub(x, set(softmax.largest)), set(softmax.inverse_temperature));
  return where_from(where_from(exp(scaled), scaled, lowest), x, set(softmax.floor));
}

}  // namespace

float block_maxima(const float* logits, size_t count, float* maxima) {
  Block sums;
  for (F16& lanes : sums.v) lanes = set(0.0f);
  for (size_t first = 0; first < count; first += kLogitBlock) {
    const Block x = load_block(logits + first, count - first);
    for (int i = 0; i < kVectors; ++i) sums.v[i] = add(sums.v[i], x.v[i]);
    *maxima++ = largest(max(max(x.v[0], x.v[1]), max(x.v[2], x.v[3])));
  }
  return sum(add(add(sums.v[0], sums.v[1]), add(sums.v[2], sums.v[3])));
}

void block_weights(const float* logits, size_t count, const Softmax& softmax, float* weights) {
  const Block x = load_block(logits, count);
  for (int i = 0; i < kVectors; ++i) {
    const int first = i * kLanes, left = static_cast<int>(count) - first;
    if (left <= 0) return;
    store_first(weights + first, weight(x.v[i], softmax), left < kLanes ? left : kLanes);
  }
}

void block_buckets(const float* logits, size_t count, const Buckets& range, int32_t* buckets) {
  const Block x = load_block(logits, count);
  int32_t padded[kLogitBlock];
  int32_t* out = count >= kLogitBlock ? buckets : padded;
  const F16 low = set(range.low), high = set(range.high), unit = set(range.unit), scale = set(range.scale);
  const F16 scaled_high = mul(high, unit), one = set(1.0f);
  for (int i = 0; i < kVectors; ++i) {
    const F16 bucket = add(one, mul(sub(scaled_high, mul(x.v[i], unit)), scale));
    store_whole(out + i * kLanes, where_from(where_from(bucket, x.v[i], low), high, x.v[i]));
  }
  if (out == padded) std::memcpy(buckets, padded, count * sizeof(int32_t));
}

void block_masses(const float* logits, size_t count, const Softmax& softmax, const float* maxima, double* masses) {
  for (size_t first = 0; first < count; first += kLogitBlock, ++maxima, ++masses) {
    *masses = 0;
    if (!(*maxima >= softmax.floor)) continue;
    const Block x = load_block(logits + first, count - first);
    F16 w[kVectors];
    for (int i = 0; i < kVectors; ++i) w[i] = weight(x.v[i], softmax);
    *masses = sum(add(add(w[0], w[1]), add(w[2], w[3])));
  }
}

}  // namespace draftline::DRAFTLINE_ISA

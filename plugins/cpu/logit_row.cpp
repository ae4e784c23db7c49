#include "logit_row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>

namespace draftline {
namespace {

constexpr int kBucketBits = 11;
constexpr size_t kNumBuckets = size_t{1} << kBucketBits;

// Orders floats as unsigned integers: -inf first.
uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

float of_key(uint32_t key) {
  const uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xffffffffu);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

LogitRow::LogitRow(const float* logits, size_t count, RowScratch& scratch)
    : logits_(logits), count_(count), num_blocks_((count + kLogitBlock - 1) / kLogitBlock), scratch_(scratch) {
  scratch.maxima.resize(num_blocks_);
  const float sum = kernels()->block_maxima(logits, count, scratch.maxima.data());
  largest_ = *std::max_element(scratch.maxima.begin(), scratch.maxima.end());
  // A NaN makes the sum one, and so may an overflow of the sum.
  is_valid_ = std::isfinite(largest_) &&
              (!std::isnan(sum) || std::none_of(logits, logits + count, [](float x) { return std::isnan(x); }));
}

size_t LogitRow::block_size(size_t block) const { return std::min(count_ - block * kLogitBlock, kLogitBlock); }

size_t LogitRow::first_of_largest() const {
  const auto& maxima = scratch_.maxima;
  const auto block = static_cast<size_t>(std::find(maxima.begin(), maxima.end(), largest_) - maxima.begin());
  const float* first = logits_ + block * kLogitBlock;
  return static_cast<size_t>(std::find(first, first + block_size(block), largest_) - logits_);
}

// The largest logit with `limit` or more of the weight at or above it; the lowest from `low` on where there is less.
// A histogram over the leading bits of the logits finds the bucket where it lies, the next one, over the bits that
// follow, refines that bucket alone; after the last it is one value. Cost: one to three passes over the blocks that
// reach `low`.
template <typename Weigh>
float LogitRow::threshold(float low, double limit, Weigh weights_of_block) {
  // Of the two zeros, the one that takes both in.
  uint32_t top = key_of(largest_ == 0 ? 0.0f : largest_);
  uint32_t bottom = std::min(key_of(low == 0 ? -0.0f : low), top);
  double above = 0;
  int num_bits = 0;
  while (num_bits < 32 && (top - bottom) >> num_bits) ++num_bits;
  float weights[kLogitBlock];
  while (true) {
    const int shift = std::max(num_bits - kBucketBits, 0);
    const uint32_t range = top - bottom;
    const float lowest = of_key(bottom);
    // Two, for ids even and odd: sums of one bucket would wait for each other.
    scratch_.histogram.assign(2 * kNumBuckets, 0.0);
    double* histogram = scratch_.histogram.data();
    for (size_t block = 0; block < num_blocks_; ++block) {
      if (!(scratch_.maxima[block] >= lowest)) continue;
      const float* x = logits_ + block * kLogitBlock;
      const size_t size = block_size(block);
      weights_of_block(x, size, weights);
      for (size_t i = 0; i < size; ++i) {
        const uint32_t below = top - key_of(x[i]);  // wraps above the top
        if (below <= range) histogram[2 * (below >> shift) + i % 2] += weights[i];
      }
    }
    uint32_t chosen = 0;
    double above_chosen = above;
    for (uint32_t bucket = 0; bucket <= range >> shift; ++bucket) {
      const double mass = histogram[2 * bucket] + histogram[2 * bucket + 1];
      if (mass == 0) continue;
      chosen = bucket;
      above_chosen = above;
      above += mass;
      if (above >= limit) break;
    }
    above = above_chosen;
    top -= chosen << shift;
    if (shift == 0) return of_key(top);
    bottom = std::max(bottom, top - std::min(top, (uint32_t{1} << shift) - 1));
    num_bits = shift;
  }
}

float LogitRow::kth_largest(size_t k) {
  float low = -INFINITY;
  if (k <= num_blocks_) {
    // k blocks have a logit that large, so the k-th largest is no smaller: all other blocks are out.
    auto& maxima = scratch_.some_maxima;
    maxima = scratch_.maxima;
    const auto kth = maxima.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(maxima.begin(), kth, maxima.end(), std::greater<>());
    low = *kth;
  }
  return threshold(low, static_cast<double>(k),
                   [](const float*, size_t size, float* weights) { std::fill(weights, weights + size, 1.0f); });
}

void LogitRow::first_from(float kth, size_t k, int64_t* ids) const {
  size_t num = 0;
  const auto collect = [&](auto is_chosen) {
    for (size_t block = 0; block < num_blocks_; ++block) {
      if (!(scratch_.maxima[block] >= kth)) continue;
      const size_t first = block * kLogitBlock, size = block_size(block);
      for (size_t i = first; i < first + size && num < k; ++i)
        if (is_chosen(logits_[i])) ids[num++] = static_cast<int64_t>(i);
    }
  };
  collect([kth](float x) { return x > kth; });
  collect([kth](float x) { return x == kth; });
}

double LogitRow::weigh(float temperature, float floor) {
  softmax_ = {largest_, std::min(1.0f / temperature, FLT_MAX), floor};
  scratch_.masses.resize(num_blocks_);
  kernels()->block_masses(logits_, count_, softmax_, scratch_.maxima.data(), scratch_.masses.data());
  sum_ = 0;
  for (const double mass : scratch_.masses) sum_ += mass;
  return sum_;
}

float LogitRow::smallest_of_nucleus(float top_p) {
  // Even all together, tokens of a weight below (1 - top_p) sum / count are less than what is dropped. The bound is
  // lowered by more than any rounding.
  const double least = (1.0 - static_cast<double>(top_p)) * sum_ / static_cast<double>(count_);
  const double low = largest_ + (natural_logarithm(least) - 0.01) / softmax_.inverse_temperature;
  const double limit = std::max(static_cast<double>(top_p) * sum_, DBL_MIN);
  return threshold(
      std::max(static_cast<float>(low), softmax_.floor), limit,
      [this](const float* x, size_t size, float* weights) { kernels()->block_weights(x, size, softmax_, weights); });
}

size_t LogitRow::draw(float uniform) {
  const double target = static_cast<double>(uniform) * sum_;
  double before = 0;
  size_t block = 0;
  for (; block + 1 < num_blocks_; ++block) {
    const double after = before + scratch_.masses[block];
    if (after > target) break;
    before = after;
  }
  float weights[kLogitBlock];
  const size_t first = block * kLogitBlock, size = block_size(block);
  kernels()->block_weights(logits_ + first, size, softmax_, weights);
  size_t last = first;  // with weight: where rounding leaves none above the target
  for (size_t i = 0; i < size; ++i) {
    if (weights[i] == 0) continue;
    last = first + i;
    before += weights[i];
    if (before > target) break;
  }
  return last;
}

double natural_logarithm(double x) {
  // x = m 2^e with m near 1, and log m = 2 artanh t by its series; t <= 0.172, so the next term is below 2e-17.
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double t = (m - 1) / (m + 1), t2 = t * t;
  double series = 0;
  for (int n = 21; n >= 1; n -= 2) series = series * t2 + 1.0 / n;
  return exponent * 0.69314718055994531 + 2 * t * series;
}

}  // namespace draftline

#include "logit_row.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>

namespace draftline {
namespace {

constexpr int32_t kNumBuckets = 1024;
constexpr size_t kMaxSorted = 4096;  // logits of a bucket

// That of `high` is 1, that of a smaller `low` the last or next to it.
Buckets buckets_of(float low, float high) {
  if (!(low < high)) return {low, high, 0.0f, 0.0f};
  const double range = static_cast<double>(high) - low;
  int exponent;
  std::frexp(range, &exponent);
  const double unit = std::ldexp(1.0, std::clamp(-exponent, -126, 127));
  return {low, high, static_cast<float>(unit), static_cast<float>((kNumBuckets - 1) / (range * unit))};
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

template <typename Function>
void LogitRow::for_each_block_of(const Buckets& range, Function function) const {
  int32_t buckets[kLogitBlock];
  for (size_t block = 0; block < num_blocks_; ++block) {
    if (!(scratch_.maxima[block] >= range.low)) continue;
    const float* x = logits_ + block * kLogitBlock;
    kernels()->block_buckets(x, block_size(block), range, buckets);
    function(x, block_size(block), buckets);
  }
}

LogitRow::Members LogitRow::members(const Buckets& range, int32_t bucket) {
  auto& found = scratch_.found;
  found.resize(kMaxSorted + kLogitBlock);
  size_t num = 0;
  bool is_many = false;
  Members members{INFINITY, -INFINITY, 0};
  const auto look_at_found = [&] {
    for (size_t i = 0; i < num; ++i) {
      members.least = std::min(members.least, found[i]);
      members.largest = std::max(members.largest, found[i]);
    }
  };
  for_each_block_of(range, [&](const float* x, size_t size, const int32_t* buckets) {
    int32_t any = 0;
    for (size_t i = 0; i < size; ++i) any |= buckets[i] == bucket;
    if (any == 0) return;
    for (size_t i = 0; i < size; ++i) {
      found[num] = x[i];
      num += buckets[i] == bucket;
    }
    if (num <= kMaxSorted) return;
    is_many = true;
    look_at_found();
    num = 0;
  });
  look_at_found();
  members.num_found = is_many ? 0 : num;
  return members;
}

// The largest logit with `limit` or more of the weight at or above it; `low` where those from `low` on weigh less.
//
// A histogram over the logits from low to high finds the bucket where it lies; the logits of that bucket are sorted, or
// where they are many, the next histogram is over them alone. Each one parts low from high, so there is an end; with
// any but contrived logits the first is the last.
template <typename Weigh>
float LogitRow::threshold(float low, double limit, Weigh weights_of_block) {
  float high = largest_, lowest = low;
  if (low == -INFINITY) {
    lowest = high;
    for (size_t i = 0; i < count_; ++i)
      if (logits_[i] < lowest && logits_[i] > -INFINITY) lowest = logits_[i];
  }
  float weights[kLogitBlock];
  double above = 0;
  while (true) {
    const Buckets range = buckets_of(lowest, high);
    scratch_.histogram.assign(kNumBuckets + 1, 0.0);
    double* histogram = scratch_.histogram.data();
    for_each_block_of(range, [&](const float* x, size_t size, const int32_t* buckets) {
      weights_of_block(x, size, weights);
      for (size_t i = 0; i < size; ++i)
        if (buckets[i] > 0) histogram[buckets[i]] += weights[i];
    });
    int32_t bucket = 1;
    for (; above + histogram[bucket] < limit; ++bucket) {
      if (bucket == kNumBuckets) return low;
      above += histogram[bucket];
    }
    if (!(lowest < high)) return high;

    const Members found = members(range, bucket);
    if (found.num_found > 0) {
      auto& sorted = scratch_.found;
      std::sort(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(found.num_found), std::greater<>());
      for (size_t i = 0; i < found.num_found; ++i) {
        const size_t place = i % kLogitBlock;
        if (place == 0) weights_of_block(&sorted[i], std::min(found.num_found - i, kLogitBlock), weights);
        above += weights[place];
        if (above >= limit) return sorted[i];
      }
      return found.least;  // of two sums of the same weights, this one was rounded to less
    }
    low = lowest = found.least;
    high = found.largest;
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
  double before = 0, after = 0;
  size_t block = 0;  // always one with weight, whatever `uniform` is
  for (size_t i = 0; i < num_blocks_; ++i) {
    if (scratch_.masses[i] == 0) continue;
    block = i;
    before = after;
    after += scratch_.masses[i];
    if (after > target) break;
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

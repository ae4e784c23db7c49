// One row of logits as its sampler sees it: the largest, the threshold of a top-k or a nucleus, a draw. The vocabulary
// is never sorted, and nothing of its size is written: what a row needs is a number or two per block of 64 logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace draftline {

// The memory of a thread; reused from row to row.
struct RowScratch {
  std::vector<float> edited;
  std::vector<float> maxima, some_maxima;  // of each block
  std::vector<double> masses;              // of each block
  std::vector<double> histogram;
  std::vector<float> found;
};

// A row of logits. Weights are float32; sums of them are float32 inside a block (one fixed tree) and float64 over
// blocks in id order, so a share of the sum is right to 3e-7.
class LogitRow {
 public:
  LogitRow(const float* logits, size_t count, RowScratch& scratch);

  // Whether each logit is finite or -inf, and one is finite. All else asks this first.
  bool is_valid() const { return is_valid_; }

  float largest() const { return largest_; }
  size_t first_of_largest() const;

  // The k-th largest logit, 1 <= k <= count.
  float kth_largest(size_t k);

  // Writes the ids of k tokens: all above the k-th largest logit, then of those equal to it the first.
  void first_from(float kth, size_t k, int64_t* ids) const;

  // Weighs the logits from `floor` on by e^((logit - largest) / temperature), all others by 0. Returns their sum.
  double weigh(float temperature, float floor);

  // The smallest logit of those with less than top_p of the weighed sum strictly above them; 0 <= top_p < 1.
  float smallest_of_nucleus(float top_p);

  // The first id whose cumulated weight exceeds uniform times the sum; never one of weight 0.
  size_t draw(float uniform);

 private:
  struct Members {
    float least, largest;
    size_t num_found;  // of scratch.found; 0 where they are too many to be listed
  };

  // Calls function(logits, count, buckets) for each block with a logit from range.low on.
  template <typename Function>
  void for_each_block_of(const Buckets& range, Function function) const;
  Members members(const Buckets& range, int32_t bucket);
  template <typename Weigh>
  float threshold(float low, double limit, Weigh weights_of_block);
  size_t block_size(size_t block) const;

  const float* logits_;
  size_t count_, num_blocks_;
  RowScratch& scratch_;
  float largest_;
  bool is_valid_;
  Softmax softmax_{};
  double sum_ = 0;
};

// log(x) for finite x > 0, off by a few units in float64's last place: the same bits with every C library.
double natural_logarithm(double x);

}  // namespace draftline

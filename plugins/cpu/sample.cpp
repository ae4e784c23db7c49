#include "sample.h"

#include <cmath>
#include <vector>

#include "logit_row.h"

namespace draftline {
namespace {

constexpr float kBanned = -1.0e30f;  // draftline.logit_edits.BANNED

RowScratch& scratch_of_thread() {
  thread_local RowScratch scratch;
  return scratch;
}

void check_shape(const Tensor& logits) {
  if (logits.num_dims != 2 || logits.dims[1] < 1) throw Error("logits are [R, V], V from 1 on");
}

// The edits of a step by row, in whatever order they come.
class Edits {
 public:
  Edits(const Call& call, size_t num_rows, size_t vocab_size) : starts_(num_rows + 1) {
    for (size_t i = 0; i < 5; ++i) inputs_[i] = call.input(5 + i);
    if (std::none_of(inputs_.begin(), inputs_.end(), [](const Tensor& input) { return input.is_given(); })) return;
    const int64_t count = inputs_[0].dims[0];
    for (const Tensor& input : inputs_)
      if (!input.is_given() || input.num_dims != 1 || input.dims[0] != count) throw Error("edits are five of [E]");
    order_.resize(static_cast<size_t>(count));
    const int32_t* rows = inputs_[0].as<int32_t>();
    const int32_t* token_ids = inputs_[1].as<int32_t>();
    for (size_t e = 0; e < order_.size(); ++e) {
      if (static_cast<uint32_t>(rows[e]) >= num_rows || static_cast<uint32_t>(token_ids[e]) >= vocab_size)
        throw Error("edits are inside the logits; got row " + std::to_string(rows[e]) + ", token " +
                    std::to_string(token_ids[e]) + " of " + std::to_string(num_rows) + " x " +
                    std::to_string(vocab_size));
      ++starts_[static_cast<size_t>(rows[e])];
    }
    // Ends of the runs, which filling them from the back turns into starts.
    size_t end = 0;
    for (size_t& start : starts_) start = end += start;
    for (size_t e = order_.size(); e-- > 0;) order_[--starts_[static_cast<size_t>(rows[e])]] = e;
  }

  // The row with its edits, in `edited`; the row itself where it has none.
  const float* apply(size_t row, const float* logits, size_t vocab_size, std::vector<float>& edited) const {
    if (starts_[row] == starts_[row + 1]) return logits;
    edited.assign(logits, logits + vocab_size);
    for (size_t i = starts_[row]; i < starts_[row + 1]; ++i) {
      const size_t e = order_[i];
      float& logit = edited[static_cast<size_t>(inputs_[1].as<int32_t>()[e])];
      const float biased = logit + inputs_[2].as<float>()[e], divisor = inputs_[3].as<float>()[e];
      const float repeated = biased > 0 ? biased / divisor : biased * divisor;
      const float offset = repeated + inputs_[4].as<float>()[e];
      logit = offset < kBanned ? kBanned : offset;  // a NaN stays one
    }
    return edited.data();
  }

 private:
  std::array<Tensor, 5> inputs_;
  std::vector<size_t> starts_, order_;
};

}  // namespace

void Sample::compute(Call& call) const {
  const Tensor logits = call.input(0);
  check_shape(logits);
  const auto num_rows = static_cast<size_t>(logits.dims[0]), vocab_size = static_cast<size_t>(logits.dims[1]);
  std::array<Tensor, 4> parameters;
  for (size_t i = 0; i < 4; ++i) {
    parameters[i] = call.input(1 + i);
    if (parameters[i].num_dims != 1 || parameters[i].dims[0] != logits.dims[0])
      throw Error("temperature, top_k, top_p and uniform are [R]");
  }
  const float* temperatures = parameters[0].as<float>();
  const int32_t* top_ks = parameters[1].as<int32_t>();
  const float* top_ps = parameters[2].as<float>();
  const float* uniforms = parameters[3].as<float>();
  const Edits edits(call, num_rows, vocab_size);
  int64_t* ids = call.output<int64_t>(0, std::array{logits.dims[0]});
  auto sample = [&](size_t r) {
    RowScratch& scratch = scratch_of_thread();
    LogitRow row(edits.apply(r, logits.as<float>() + r * vocab_size, vocab_size, scratch.edited), vocab_size, scratch);
    if (!row.is_valid()) {
      ids[r] = -1;
      return;
    }
    if (!(temperatures[r] > 0)) {
      ids[r] = static_cast<int64_t>(row.first_of_largest());
      return;
    }
    float floor = -INFINITY;
    const auto top_k = static_cast<size_t>(std::max(top_ks[r], 0));
    if (0 < top_k && top_k < vocab_size) floor = row.kth_largest(top_k);
    row.weigh(temperatures[r], floor);
    if (top_ps[r] < 1) row.weigh(temperatures[r], row.smallest_of_nucleus(std::max(top_ps[r], 0.0f)));
    ids[r] = static_cast<int64_t>(row.draw(uniforms[r]));
  };
  call.parallel_for(num_rows, 0, sample);
}

TopCandidates::TopCandidates(const Attributes& attributes) : num_candidates_(attributes.size("num_candidates")) {}

void TopCandidates::compute(Call& call) const {
  const Tensor logits = call.input(0);
  check_shape(logits);
  if (num_candidates_ > logits.dims[1])
    throw Error("num_candidates is at most V; got " + std::to_string(num_candidates_) + " of " +
                std::to_string(logits.dims[1]));
  const auto num_rows = static_cast<size_t>(logits.dims[0]), vocab_size = static_cast<size_t>(logits.dims[1]);
  const auto k = static_cast<size_t>(num_candidates_);
  int64_t* ids = call.output<int64_t>(0, std::array{logits.dims[0], num_candidates_});
  float* log_probs = call.output<float>(1, std::array{logits.dims[0], num_candidates_});
  auto choose = [&](size_t r) {
    const float* x = logits.as<float>() + r * vocab_size;
    LogitRow row(x, vocab_size, scratch_of_thread());
    int64_t* chosen = ids + r * k;
    if (!row.is_valid()) {
      for (size_t i = 0; i < k; ++i) chosen[i] = static_cast<int64_t>(i);
      std::fill_n(log_probs + r * k, k, -INFINITY);
      return;
    }
    row.first_from(row.kth_largest(k), k, chosen);
    std::sort(chosen, chosen + k, [x](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    const double log_sum = natural_logarithm(row.weigh(1.0f, -INFINITY));
    for (size_t i = 0; i < k; ++i) {
      const double logit = x[chosen[i]];
      log_probs[r * k + i] = static_cast<float>(logit - row.largest() - log_sum);
    }
  };
  call.parallel_for(num_rows, 0, choose);
}

}  // namespace draftline

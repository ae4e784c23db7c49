// The kernels of attention, in the terms of kernels.h, which includes this.
//
// Keys are summed in chunks of kKeyChunk positions. Key p of a row stands in place p % kKeyChunk of its chunk, and each
// sum goes over places in one order; so a row's bits depend on its own keys and their positions alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace draftline {

constexpr size_t kKeyChunk = 128;

// What a chunk, or all chunks so far, give to a query: sums over keys of exp(score - max) and of the values times it.
// Floats in a row: the values' sums, filled up with zeros to lanes, then the maximum and the sum of weights; a sum of 0
// says that there was no key.
static constexpr size_t padded_head_size(size_t head_size) { return (head_size + 15) / 16 * 16; }
static constexpr size_t partial_size(size_t head_size) { return padded_head_size(head_size) + 16; }

// Rows of keys and values are pointers to `head_size` elements, floats or halves. Those `ahead` places behind the row
// in work are fetched into the cache meanwhile, so the list goes on for `ahead` rows behind the last.
struct AttentionKernels {
  // scores[i * kKeyChunk + j] = queries[i] . keys[j], the queries padded_head_size() apart, filled up with zeros.
  using Scores = void (*)(const float* queries, size_t num_queries, const void* const* keys, size_t num_keys,
                          size_t ahead, size_t head_size, float* scores);
  Scores scores_float, scores_half;

  // Places `begin` .. `end` of a chunk: scores, limited by `softcap` unless it is 0, become weights, and the rest of
  // their vectors 0. Writes the maximum and the sum of weights, which is taken lane by place modulo the number of
  // lanes.
  void (*weights)(float* scores, size_t begin, size_t end, float softcap, float* max_and_sum);

  // partials[i][0 .. head_size) += weights[i * kKeyChunk + j] values[j], key after key.
  using Values = void (*)(const float* weights, size_t num_queries, const void* const* values, size_t num_keys,
                          size_t ahead, size_t head_size, float* partials);
  Values values_float, values_half;

  // total = total and then part.
  void (*merge)(float* total, const float* part, size_t head_size);
  // out = the values' sums over the sum of weights, that of the sink, exp(sink - max), among them. A sum is 1 at least,
  // so that the smallest that exp() gives, that of -infinity, changes no bit.
  void (*finish)(const float* total, size_t head_size, float sink, float* out);

  // Rounds to halves, to even.
  void (*round_to_halves)(const float* from, size_t count, uint16_t* to);
};

}  // namespace draftline

#if defined(DRAFTLINE_ISA)
namespace draftline::DRAFTLINE_ISA {
extern const AttentionKernels kAttention;
}
#endif

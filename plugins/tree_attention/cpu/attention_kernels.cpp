// Compiled once per instruction set.
#include "kernels.h"
#include "simd.h"

namespace draftline::DRAFTLINE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr size_t kQueryTile = 4;  // queries by keys, or by vectors of a value, whose sums stay in registers
#else
constexpr size_t kQueryTile = 1;
#endif
constexpr size_t kKeyTile = 4, kVectorTile = 4;
constexpr size_t kCachedKeys = 32;  // whose values stay in the nearest cache while all queries pass over them
constexpr size_t kLine = 64;        // bytes

inline F16 load_row(const float* p) { return load(p); }
inline F16 load_row(const uint16_t* p) { return load_half(p); }
inline F16 load_row_first(const float* p, int n) { return load_first(p, n); }
inline F16 load_row_first(const uint16_t* p, int n) { return load_half_first(p, n); }

template <size_t kCount>
struct Count {
  static constexpr size_t value = kCount;
};

template <typename T>
inline const T* row(const void* const* rows, size_t i) {
  return static_cast<const T*>(rows[i]);
}

template <typename T>
inline void prefetch_elements(const T* p, size_t count) {
  for (size_t i = 0; i < count; i += kLine / sizeof(T)) prefetch_far(p + i);
}

template <typename T, size_t kQueries>
inline void score_tile(const float* queries, const void* const* keys, size_t num_keys, size_t head_size,
                       float* scores) {
  const size_t stride = padded_head_size(head_size);
  const T* key[kKeyTile];
  for (size_t j = 0; j < kKeyTile; ++j) key[j] = row<T>(keys, j < num_keys ? j : num_keys - 1);
  F16 sums[kQueries][kKeyTile];
  const auto add_products = [&](size_t d, F16 k0, F16 k1, F16 k2, F16 k3) {
    keep(k0);
    keep(k1);
    keep(k2);
    keep(k3);
#pragma GCC unroll 8
    for (size_t i = 0; i < kQueries; ++i) {
      F16 q = load(queries + i * stride + d);
      keep(q);
      sums[i][0] = fma(q, k0, sums[i][0]);
      sums[i][1] = fma(q, k1, sums[i][1]);
      sums[i][2] = fma(q, k2, sums[i][2]);
      sums[i][3] = fma(q, k3, sums[i][3]);
    }
  };
#pragma GCC unroll 8
  for (size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (size_t j = 0; j < kKeyTile; ++j) sums[i][j] = set(0.0f);
  }
  size_t d = 0;
  for (; d + kLanes <= head_size; d += kLanes) {
    add_products(d, load_row(key[0] + d), load_row(key[1] + d), load_row(key[2] + d), load_row(key[3] + d));
  }
  if (d < head_size) {
    const int rest = static_cast<int>(head_size - d);
    add_products(d, load_row_first(key[0] + d, rest), load_row_first(key[1] + d, rest),
                 load_row_first(key[2] + d, rest), load_row_first(key[3] + d, rest));
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < kQueries; ++i) {
    if (num_keys == kKeyTile) {
      store_sums(scores + i * kKeyChunk, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    } else {
      float four[kKeyTile];
      store_sums(four, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      for (size_t j = 0; j < num_keys; ++j) scores[i * kKeyChunk + j] = four[j];
    }
  }
}

// Calls function(number, i) for tiles of queries i, i + 1, .., that number known to the compiler.
template <typename Function>
inline void for_query_tiles(size_t num_queries, Function function) {
  size_t i = 0;
  for (; i + kQueryTile <= num_queries; i += kQueryTile) function(Count<kQueryTile>(), i);
  if constexpr (kQueryTile == 4) {
    switch (num_queries - i) {
      case 3:
        return function(Count<3>(), i);
      case 2:
        return function(Count<2>(), i);
      case 1:
        return function(Count<1>(), i);
    }
  }
}

template <typename T>
void scores(const float* queries, size_t num_queries, const void* const* keys, size_t num_keys, size_t ahead,
            size_t head_size, float* out) {
  const size_t stride = padded_head_size(head_size);
  for (size_t j = 0; j < num_keys; j += kKeyTile) {
    const size_t count = num_keys - j < kKeyTile ? num_keys - j : kKeyTile;
    if (ahead != 0) {
      for (size_t n = 0; n < count; ++n) prefetch_elements(row<T>(keys, j + n + ahead), head_size);
    }
    for_query_tiles(num_queries, [&](auto tile, size_t i) {
      score_tile<T, tile.value>(queries + i * stride, keys + j, count, head_size, out + i * kKeyChunk + j);
    });
  }
}

// softcap * tanh(score / softcap); NaN where a score is not finite, which tanh would hide.
void limit(float* scores, size_t first, size_t last, float softcap) {
  const F16 most = set(softcap), share = set(1.0f / softcap);
  for (size_t j = first; j < last; j += kLanes) {
    const F16 score = load(scores + j);
    store(scores + j, fma(score, set(0.0f), mul(most, tanh(mul(score, share)))));
  }
}

void weights(float* scores, size_t begin, size_t end, float softcap, float* max_and_sum) {
  const size_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
  const auto fill_rest = [&](float x) {
    for (size_t j = first; j < begin; ++j) scores[j] = x;
    for (size_t j = end; j < last; ++j) scores[j] = x;
  };
  fill_rest(scores[begin]);  // changes no maximum
  if (softcap != 0.0f) limit(scores, first, last, softcap);
  F16 most = load(scores + first);
  F16 total = mul(most, set(0.0f));  // 0, or NaN where a score is not finite, which max() and exp() may hide
  for (size_t j = first + kLanes; j < last; j += kLanes) {
    const F16 score = load(scores + j);
    most = max(most, score);
    total = fma(score, set(0.0f), total);
  }
  max_and_sum[0] = largest(most);
  const F16 shift = set(max_and_sum[0]);
  if (begin == first && end == last) {
    for (size_t j = first; j < last; j += kLanes) {
      const F16 weight = exp(sub(load(scores + j), shift));
      store(scores + j, weight);
      total = add(total, weight);
    }
  } else {
    for (size_t j = first; j < last; j += kLanes) store(scores + j, exp(sub(load(scores + j), shift)));
    fill_rest(0.0f);
    for (size_t j = first; j < last; j += kLanes) total = add(total, load(scores + j));
  }
  max_and_sum[1] = sum(total);
}

template <typename T, size_t kQueries, size_t kVectors>
inline void value_tile(const float* weights, const void* const* values, size_t num_keys, size_t ahead, size_t d,
                       float* partials, size_t stride) {
  F16 sums[kQueries][kVectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (size_t n = 0; n < kVectors; ++n) sums[i][n] = load(partials + i * stride + d + n * kLanes);
  }
  for (size_t j = 0; j < num_keys; ++j) {
    const T* value = row<T>(values, j) + d;
    if (ahead != 0) prefetch_elements(row<T>(values, j + ahead) + d, kVectors * kLanes);
    F16 v[kVectors];
#pragma GCC unroll 8
    for (size_t n = 0; n < kVectors; ++n) {
      v[n] = load_row(value + n * kLanes);
      keep(v[n]);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kQueries; ++i) {
      F16 weight = set(weights[i * kKeyChunk + j]);
      keep(weight);
#pragma GCC unroll 8
      for (size_t n = 0; n < kVectors; ++n) sums[i][n] = fma(weight, v[n], sums[i][n]);
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < kQueries; ++i) {
#pragma GCC unroll 8
    for (size_t n = 0; n < kVectors; ++n) store(partials + i * stride + d + n * kLanes, sums[i][n]);
  }
}

template <typename T, size_t kQueries>
inline void value_rows(const float* weights, const void* const* values, size_t num_keys, size_t ahead, size_t head_size,
                       float* partials) {
  const size_t stride = partial_size(head_size);
  size_t d = 0;
  for (; d + kVectorTile * kLanes <= head_size; d += kVectorTile * kLanes) {
    value_tile<T, kQueries, kVectorTile>(weights, values, num_keys, ahead, d, partials, stride);
  }
  for (; d + kLanes <= head_size; d += kLanes) {
    value_tile<T, kQueries, 1>(weights, values, num_keys, ahead, d, partials, stride);
  }
  if (d == head_size) return;
  const int rest = static_cast<int>(head_size - d);
  for (size_t i = 0; i < kQueries; ++i) {
    float* place = partials + i * stride + d;
    F16 total = load(place);
    for (size_t j = 0; j < num_keys; ++j) {
      total = fma(set(weights[i * kKeyChunk + j]), load_row_first(row<T>(values, j) + d, rest), total);
    }
    store(place, total);
  }
}

template <typename T>
void values(const float* weights, size_t num_queries, const void* const* rows, size_t num_keys, size_t ahead,
            size_t head_size, float* partials) {
  const size_t stride = partial_size(head_size);
  for (size_t j = 0; j < num_keys; j += kCachedKeys) {
    const size_t count = num_keys - j < kCachedKeys ? num_keys - j : kCachedKeys;
    for_query_tiles(num_queries, [&](auto tile, size_t i) {
      value_rows<T, tile.value>(weights + i * kKeyChunk + j, rows + j, count, i == 0 ? ahead : 0, head_size,
                                partials + i * stride);
    });
  }
}

void merge(float* total, const float* part, size_t head_size) {
  const size_t size = padded_head_size(head_size);
  float* max_and_sum = total + size;
  if (part[size + 1] == 0.0f) return;
  if (max_and_sum[1] == 0.0f) {
    std::memcpy(total, part, partial_size(head_size) * sizeof(float));
    return;
  }
  const float old_max = max_and_sum[0], part_max = part[size];
  const float new_max = old_max > part_max ? old_max : part_max;
  const F16 old_factor = exp(sub(set(old_max), set(new_max))), part_factor = exp(sub(set(part_max), set(new_max)));
  for (size_t d = 0; d <= size; d += kLanes) {  // the sum of weights as well
    store(total + d, fma(load(part + d), part_factor, mul(load(total + d), old_factor)));
  }
  max_and_sum[0] = new_max;
}

void finish(const float* total, size_t head_size, float sink, float* out) {
  const float* max_and_sum = total + padded_head_size(head_size);
  const F16 sum_of_weights = add(set(max_and_sum[1]), exp(sub(set(sink), set(max_and_sum[0]))));
  for (size_t d = 0; d < head_size; d += kLanes) {
    const int count = static_cast<int>(head_size - d < kLanes ? head_size - d : kLanes);
    store_first(out + d, div(load(total + d), sum_of_weights), count);
  }
}

void round_to_halves(const float* from, size_t count, uint16_t* to) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_half(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_half(from[i]);
}

}  // namespace

extern const AttentionKernels kAttention;
const AttentionKernels kAttention = {
    scores<float>, scores<uint16_t>, weights, values<float>, values<uint16_t>, merge, finish, round_to_halves,
};

}  // namespace draftline::DRAFTLINE_ISA

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

template <typename T>
inline const T* row(const void* const* rows, size_t i) {
  return static_cast<const T*>(rows[i]);
}

template <typename T>
inline void prefetch_elements(const T* p, size_t count) {
  for (size_t i = 0; i < count; i += kLine / sizeof(T)) prefetch(p + i);
}

template <typename T, size_t kQueries>
inline void score_tile(const float* const* queries, const void* const* keys, size_t num_keys, size_t head_size,
                       float* scores) {
  const T* key[kKeyTile];
  for (size_t j = 0; j < kKeyTile; ++j) key[j] = row<T>(keys, j < num_keys ? j : num_keys - 1);
  F16 sums[kQueries][kKeyTile];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t j = 0; j < kKeyTile; ++j) sums[i][j] = set(0.0f);
  }
  size_t d = 0;
  for (; d + kLanes <= head_size; d += kLanes) {
    F16 k[kKeyTile];
    for (size_t j = 0; j < kKeyTile; ++j) k[j] = load_row(key[j] + d);
    for (size_t i = 0; i < kQueries; ++i) {
      const F16 q = load(queries[i] + d);
      for (size_t j = 0; j < kKeyTile; ++j) sums[i][j] = fma(q, k[j], sums[i][j]);
    }
  }
  if (d < head_size) {
    const int rest = static_cast<int>(head_size - d);
    for (size_t i = 0; i < kQueries; ++i) {
      const F16 q = load_first(queries[i] + d, rest);
      for (size_t j = 0; j < kKeyTile; ++j) sums[i][j] = fma(q, load_row_first(key[j] + d, rest), sums[i][j]);
    }
  }
  for (size_t i = 0; i < kQueries; ++i) {
    float four[kKeyTile];
    store_sums(four, sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
    if (num_keys == kKeyTile) {
      std::memcpy(scores + i * kKeyChunk, four, sizeof four);
    } else {
      for (size_t j = 0; j < num_keys; ++j) scores[i * kKeyChunk + j] = four[j];
    }
  }
}

template <typename T>
void scores(const float* const* queries, size_t num_queries, const void* const* keys, size_t num_keys, size_t ahead,
            size_t head_size, float* out) {
  for (size_t j = 0; j < num_keys; j += kKeyTile) {
    const size_t count = num_keys - j < kKeyTile ? num_keys - j : kKeyTile;
    if (ahead != 0) {
      for (size_t n = 0; n < count; ++n) prefetch_elements(row<T>(keys, j + n + ahead), head_size);
    }
    for (size_t i = 0; i < num_queries;) {
      float* place = out + i * kKeyChunk + j;
      const size_t rest = num_queries - i;
      if constexpr (kQueryTile == 4) {
        if (rest >= 4) {
          score_tile<T, 4>(queries + i, keys + j, count, head_size, place);
          i += 4;
          continue;
        }
        if (rest == 3) {
          score_tile<T, 3>(queries + i, keys + j, count, head_size, place);
          break;
        }
        if (rest == 2) {
          score_tile<T, 2>(queries + i, keys + j, count, head_size, place);
          break;
        }
      }
      score_tile<T, 1>(queries + i, keys + j, count, head_size, place);
      ++i;
    }
  }
}

void weights(float* scores, size_t begin, size_t end, float scale, float* max, float* sum_of_weights) {
  const size_t first = begin / kLanes * kLanes, last = (end + kLanes - 1) / kLanes * kLanes;
  const auto fill = [&](float x) {
    for (size_t j = first; j < begin; ++j) scores[j] = x;
    for (size_t j = end; j < last; ++j) scores[j] = x;
  };
  fill(scores[begin]);  // changes no maximum
  F16 most = mul(load(scores + first), set(scale));
  for (size_t j = first + kLanes; j < last; j += kLanes)
    most = draftline::DRAFTLINE_ISA::max(most, mul(load(scores + j), set(scale)));
  *max = largest(most);
  const F16 shift = set(*max);
  for (size_t j = first; j < last; j += kLanes) {
    store(scores + j, exp(sub(mul(load(scores + j), set(scale)), shift)));
  }
  fill(0.0f);
  F16 total = load(scores + first);
  for (size_t j = first + kLanes; j < last; j += kLanes) total = add(total, load(scores + j));
  *sum_of_weights = sum(total);
}

template <typename T, size_t kQueries, size_t kVectors>
inline void value_tile(const float* weights, const void* const* values, size_t num_keys, size_t ahead, size_t d,
                       float* partials, size_t stride) {
  F16 sums[kQueries][kVectors];
  for (size_t i = 0; i < kQueries; ++i) {
    for (size_t n = 0; n < kVectors; ++n) sums[i][n] = load(partials + i * stride + d + n * kLanes);
  }
  for (size_t j = 0; j < num_keys; ++j) {
    const T* value = row<T>(values, j) + d;
    if (ahead != 0) prefetch_elements(row<T>(values, j + ahead) + d, kVectors * kLanes);
    F16 v[kVectors];
    for (size_t n = 0; n < kVectors; ++n) v[n] = load_row(value + n * kLanes);
    for (size_t i = 0; i < kQueries; ++i) {
      const F16 weight = set(weights[i * kKeyChunk + j]);
      for (size_t n = 0; n < kVectors; ++n) sums[i][n] = fma(weight, v[n], sums[i][n]);
    }
  }
  for (size_t i = 0; i < kQueries; ++i) {
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
    for (size_t i = 0; i < num_queries;) {
      const float* weight = weights + i * kKeyChunk + j;
      float* partial = partials + i * stride;
      const size_t rest = num_queries - i, fetched = i == 0 ? ahead : 0;
      if constexpr (kQueryTile == 4) {
        if (rest >= 4) {
          value_rows<T, 4>(weight, rows + j, count, fetched, head_size, partial);
          i += 4;
          continue;
        }
        if (rest == 3) {
          value_rows<T, 3>(weight, rows + j, count, fetched, head_size, partial);
          break;
        }
        if (rest == 2) {
          value_rows<T, 2>(weight, rows + j, count, fetched, head_size, partial);
          break;
        }
      }
      value_rows<T, 1>(weight, rows + j, count, fetched, head_size, partial);
      ++i;
    }
  }
}

void merge(float* total, const float* part, size_t head_size) {
  const size_t size = padded_head_size(head_size);
  if (part[size + 1] == 0.0f) return;
  if (total[size + 1] == 0.0f) {
    std::memcpy(total, part, partial_size(head_size) * sizeof(float));
    return;
  }
  const float old_max = total[size], part_max = part[size];
  const float new_max = old_max > part_max ? old_max : part_max;
  float factors[kLanes] = {old_max - new_max, part_max - new_max};
  store(factors, exp(load(factors)));
  const F16 old_factor = set(factors[0]), part_factor = set(factors[1]);
  for (size_t d = 0; d < size; d += kLanes) {
    store(total + d, fma(load(part + d), part_factor, mul(load(total + d), old_factor)));
  }
  float sums[kLanes] = {total[size + 1]}, part_sums[kLanes] = {part[size + 1]};
  store(sums, fma(load(part_sums), part_factor, mul(load(sums), old_factor)));
  total[size] = new_max;
  total[size + 1] = sums[0];
}

void finish(const float* total, size_t head_size, float* out) {
  const F16 sum_of_weights = set(total[padded_head_size(head_size) + 1]);
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

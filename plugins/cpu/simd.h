// Sixteen floats at a time, the same on every processor.
//
// A file that includes this is compiled once per instruction set, with DRAFTLINE_ISA as the name of its namespace. The
// width is 16 lanes everywhere (AVX2 takes two registers, NEON four), products are fused with sums everywhere, and sums
// over lanes follow one tree: results are the same bits on every instruction set.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace draftline::DRAFTLINE_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct F16 {
  __m512 v;
};
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Keeps what was loaded in its register: GCC would load it again for each product.
inline void keep(F16& a) { asm("" : "+v"(a.v)); }
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_half(uint16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F16 set(float x) { return {_mm512_set1_ps(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Without their fractions, which int32 must hold.
inline void store_whole(int32_t* p, F16 a) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(a.v)); }
// a where x >= bound, 0 elsewhere.
inline F16 where_from(F16 a, F16 x, F16 bound) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_GE_OQ), a.v)};
}
// 2^n for whole n in -126 .. 127.
inline F16 power_of_two(F16 n) {
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// Lanes i and i + 8.
inline __m256 fold(F16 a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
inline __m256 fold_max(F16 a) { return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }

#elif defined(__AVX2__)

struct F16 {
  __m256 lo, hi;
};
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 load_half(const uint16_t* p) {
  const auto* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline void keep(F16&) {}  // a load for each product costs nothing here
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_half(uint16_t* p, F16 a) {
  auto* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline F16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F16 round(F16 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}
inline void store_whole(int32_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvttps_epi32(a.hi));
}
inline F16 where_from(F16 a, F16 x, F16 bound) {
  return {_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_GE_OQ)),
          _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_GE_OQ))};
}
inline F16 power_of_two(F16 n) {
  const auto half = [](__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  };
  return {half(n.lo), half(n.hi)};
}
inline __m256 fold(F16 a) { return _mm256_add_ps(a.lo, a.hi); }
inline __m256 fold_max(F16 a) { return _mm256_max_ps(a.lo, a.hi); }

#elif defined(__ARM_NEON)

struct F16 {
  float32x4_t v[4];
};
template <typename Function>
inline F16 each(Function function) {
  return {function(0), function(1), function(2), function(3)};
}
inline F16 load(const float* p) {
  return each([=](int i) { return vld1q_f32(p + 4 * i); });
}
inline F16 load_half(const uint16_t* p) {
  return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void keep(F16&) {}
inline void store(float* p, F16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline void store_half(uint16_t* p, F16 a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
inline F16 set(float x) {
  return each([=](int) { return vdupq_n_f32(x); });
}
inline F16 add(F16 a, F16 b) {
  return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline F16 sub(F16 a, F16 b) {
  return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline F16 mul(F16 a, F16 b) {
  return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline F16 div(F16 a, F16 b) {
  return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline F16 fma(F16 a, F16 b, F16 c) {
  return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline F16 max(F16 a, F16 b) {
  return each([&](int i) { return vmaxq_f32(a.v[i], b.v[i]); });
}
inline F16 min(F16 a, F16 b) {
  return each([&](int i) { return vminq_f32(a.v[i], b.v[i]); });
}
inline F16 round(F16 a) {
  return each([&](int i) { return vrndnq_f32(a.v[i]); });
}
inline void store_whole(int32_t* p, F16 a) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, vcvtq_s32_f32(a.v[i]));
}
inline F16 where_from(F16 a, F16 x, F16 bound) {
  return each([&](int i) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v[i]), vcgeq_f32(x.v[i], bound.v[i])));
  });
}
inline F16 power_of_two(F16 n) {
  return each([&](int i) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
  });
}

#endif

#if defined(__AVX2__)

inline float sum(F16 a) {
  const __m256 eight = fold(a);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
// The sums of four, each by the tree of sum().
inline void store_sums(float* p, F16 a, F16 b, F16 c, F16 d) {
  const auto halves = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const __m256 ab = halves(fold(a), fold(b)), cd = halves(fold(c), fold(d));  // four lanes each: a b, c d
  const __m256 two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));  // a c, b d
  const __m256 one = _mm256_add_ps(_mm256_shuffle_ps(two, two, 0x88), _mm256_shuffle_ps(two, two, 0xdd));
  _mm_storeu_ps(p, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}
inline float largest(F16 a) {
  const __m256 eight = fold_max(a);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// The largest |lane| of both, by bits: infinity is above all that is finite, and a NaN above infinity.
inline float largest_size(F16 a, F16 b) {
#if defined(__AVX512F__)
  const __m512i size = _mm512_set1_epi32(0x7fffffff);
  const __m512i all = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), size),
                                       _mm512_and_si512(_mm512_castps_si512(b.v), size));
  const __m256i eight = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti32x8_epi32(all, 1));
#else
  const __m256i size = _mm256_set1_epi32(0x7fffffff);
  const auto greater = [&](__m256 x, __m256 y) {
    return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x), size),
                            _mm256_and_si256(_mm256_castps_si256(y), size));
  };
  const __m256i eight = _mm256_max_epi32(greater(a.lo, a.hi), greater(b.lo, b.hi));
#endif
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the second cache, which takes more lines at a time from memory than the first.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline uint16_t to_half(float x) {
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline float from_half(uint16_t x) { return _cvtsh_ss(x); }

#elif defined(__ARM_NEON)

// Lanes i + 8, then i + 4, then i + 2, then i + 1: the tree of the other instruction sets.
inline float sum(F16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// The sums of four, each by the tree of sum().
inline void store_sums(float* p, F16 a, F16 b, F16 c, F16 d) {
  const auto four = [](F16 x) { return vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3])); };
  const auto two = [](float32x4_t x, float32x4_t y) {
    return vaddq_f32(vcombine_f32(vget_low_f32(x), vget_low_f32(y)), vcombine_f32(vget_high_f32(x), vget_high_f32(y)));
  };
  vst1q_f32(p, vpaddq_f32(two(four(a), four(b)), two(four(c), four(d))));
}
inline float largest(F16 a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3]))); }
inline float largest_size(F16 a, F16 b) {
  const auto size = [](float32x4_t x) { return vreinterpretq_u32_f32(vabsq_f32(x)); };
  const auto greater = [&](int i) { return vmaxq_u32(size(a.v[i]), size(b.v[i])); };
  const uint32x4_t four = vmaxq_u32(vmaxq_u32(greater(0), greater(1)), vmaxq_u32(greater(2), greater(3)));
  return vgetq_lane_f32(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(four))), 0);
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
inline uint16_t to_half(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }
inline float from_half(uint16_t x) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0); }

#endif

// The first n lanes, 0 <= n <= 16; the others are 0.
inline F16 load_first(const float* p, int n) {
  if (n == kLanes) return load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return load(lanes);
}
inline F16 load_half_first(const uint16_t* p, int n) {
  if (n == kLanes) return load_half(p);
  uint16_t lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_half(lanes);
}
inline void store_first(float* p, F16 a, int n) {
  if (n == kLanes) return store(p, a);
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}

// x = n ln 2 + r with whole n and |r| <= ln 2 / 2, and the slope (e^r - 1) / r; x outside of -87 .. 88 is moved to the
// nearer end, NaN stays NaN. The slope's Taylor polynomial of degree 6 makes e^r off by 6e-9 at most.
struct ReducedExponent {
  F16 n, r, slope;
};
inline ReducedExponent reduce_exponent(F16 x) {
  x = min(set(88.0f), max(set(-87.0f), x));  // of two operands with a NaN x86 takes the second
  const F16 n = round(mul(x, set(1.44269504088896341f)));
  F16 r = fma(n, set(-0.693145751953125f), x);  // ln 2 in two parts: the first has few digits, n times it is exact
  r = fma(n, set(-1.42860682030941723e-6f), r);
  F16 y = set(1.0f / 5040);
  y = fma(y, r, set(1.0f / 720));
  y = fma(y, r, set(1.0f / 120));
  y = fma(y, r, set(1.0f / 24));
  y = fma(y, r, set(1.0f / 6));
  y = fma(y, r, set(0.5f));
  return {n, r, fma(y, r, set(1.0f))};
}

// e^x within 2 units in the last place for x in -87 .. 88; x outside is moved to the nearer end, NaN stays NaN.
inline F16 exp(F16 x) {
  const ReducedExponent e = reduce_exponent(x);
  return mul(fma(e.slope, e.r, set(1.0f)), power_of_two(e.n));
}

// tanh x = (e^2x - 1) / (e^2x + 1) within 3 units in the last place, NaN stays NaN. Near 0 n is 0 and no digit is
// lost: e^2x - 1 is r times the slope.
inline F16 tanh(F16 x) {
  const ReducedExponent e = reduce_exponent(add(x, x));
  const F16 power = power_of_two(e.n);
  const F16 grown = fma(mul(e.slope, e.r), power, sub(power, set(1.0f)));
  return div(grown, add(grown, set(2.0f)));
}

}  // namespace draftline::DRAFTLINE_ISA

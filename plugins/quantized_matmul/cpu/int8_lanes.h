// Sixteen sums of products of small integers, the same on every processor. As simd.h, compiled once per instruction
// set.
#pragma once

#include "simd.h"

namespace draftline::DRAFTLINE_ISA {

// Four inputs of sixteen outputs: 64 codes, the inputs of an output side by side.
//
// Dots<bits>: sums over the inputs of a block. begin() takes `offset`, -128 (8 bits) or -1 (4 bits) times the sum of
// the inputs, and with 4 bits the zero points of the outputs; add() takes codes and four inputs in -127 .. 127; sums()
// gives the sums of (code - zero point) * input. Sums of integers: the order does not matter.

#if defined(__AVX512VNNI__)

struct Codes {
  __m512i v;
};
inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
template <int kBits>
inline Codes operand(Codes codes) {
  return codes;
}
inline Codes low_halves(Codes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Codes high_halves(Codes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }

template <int kBits>
struct Dots {
  __m512i v;
  void begin(int32_t offset, const uint8_t* zeros) {
    const __m512i offsets = _mm512_set1_epi32(offset);
    if constexpr (kBits == 8) {
      v = offsets;
    } else {  // both fit 16 bits
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
      v = _mm512_madd_epi16(_mm512_cvtepu8_epi32(bytes), offsets);
    }
  }
  void add(Codes codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
    v = _mm512_dpbusd_epi32(v, codes.v, _mm512_set1_epi32(four));
  }
  F16 sums() const { return {_mm512_cvtepi32_ps(v)}; }
};

// Rounds to the nearest, ties to even; returns the sum.
inline int32_t store_rounded(int8_t* p, F16 a) {
  const __m512i whole = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}
constexpr int kRowsAtOnce = 8;

#elif defined(__AVX2__)

struct Codes {
  __m256i lo, hi;
};
inline Codes load_codes(const uint8_t* p) {
  const auto* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
// 8 bits: signed, in -127 .. 127.
template <int kBits>
inline Codes operand(Codes codes) {
  if constexpr (kBits == 4) return codes;
  const __m256i top = _mm256_set1_epi8(-128);
  return {_mm256_xor_si256(codes.lo, top), _mm256_xor_si256(codes.hi, top)};
}
inline Codes low_halves(Codes a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Codes high_halves(Codes a) { return low_halves({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }

template <int kBits>
struct Dots;

inline __m256i four_inputs(const int8_t* inputs) {
  int32_t four;
  std::memcpy(&four, inputs, sizeof(four));
  return _mm256_set1_epi32(four);
}

template <>
struct Dots<8> {
  __m256i lo, hi;
  void begin(int32_t, const uint8_t*) { lo = hi = _mm256_setzero_si256(); }
  void add(Codes codes, const int8_t* inputs) {
    const __m256i four = four_inputs(inputs), size = _mm256_abs_epi8(four), one = _mm256_set1_epi16(1);
    // Of two products of at most 127 * 127 each, the sum fits 16 bits.
    const auto dot = [&](__m256i c) {
      return _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(c, four)), one);
    };
    lo = _mm256_add_epi32(lo, dot(codes.lo));
    hi = _mm256_add_epi32(hi, dot(codes.hi));
  }
  F16 sums() const { return {_mm256_cvtepi32_ps(lo), _mm256_cvtepi32_ps(hi)}; }
};

template <>
struct Dots<4> {
  __m256i lo, hi;              // of 16 bits, two for each output: 16 products of at most 15 * 127 fit
  __m256i start_lo, start_hi;  // of 32 bits
  void begin(int32_t offset, const uint8_t* zeros) {
    lo = hi = _mm256_setzero_si256();
    const __m256i offsets = _mm256_set1_epi32(offset);
    const auto start = [&](const uint8_t* p) {
      return _mm256_madd_epi16(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), offsets);
    };
    start_lo = start(zeros);
    start_hi = start(zeros + 8);
  }
  void add(Codes codes, const int8_t* inputs) {
    const __m256i four = four_inputs(inputs);
    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(codes.lo, four));
    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(codes.hi, four));
  }
  F16 sums() const {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_cvtepi32_ps(_mm256_add_epi32(start_lo, _mm256_madd_epi16(lo, one))),
            _mm256_cvtepi32_ps(_mm256_add_epi32(start_hi, _mm256_madd_epi16(hi, one)))};
  }
};

inline int32_t store_rounded(int8_t* p, F16 a) {
  const __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
  const __m256i mixed = _mm256_packs_epi32(lo, hi);  // fours 0, 2, 1, 3
  const __m256i words = _mm256_permute4x64_epi64(mixed, 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
  __m128i sum = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}
constexpr int kRowsAtOnce = 4;

#elif defined(__ARM_NEON)

struct Codes {
  uint8x16_t v[4];
};
inline Codes load_codes(const uint8_t* p) {
  return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
template <typename Function>
inline Codes each_code(Function function) {
  return {function(0), function(1), function(2), function(3)};
}
// 8 bits: signed, in -127 .. 127.
template <int kBits>
inline Codes operand(Codes codes) {
  if constexpr (kBits == 4) return codes;
  return each_code([&](int i) { return veorq_u8(codes.v[i], vdupq_n_u8(128)); });
}
inline Codes low_halves(Codes a) {
  return each_code([&](int i) { return vandq_u8(a.v[i], vdupq_n_u8(15)); });
}
inline Codes high_halves(Codes a) {
  return each_code([&](int i) { return vshrq_n_u8(a.v[i], 4); });
}

template <int kBits>
struct Dots {
  int32x4_t start[4];
#if defined(__ARM_FEATURE_DOTPROD)
  int32x4_t total[4];
#else
  int32x4_t total[8];  // two sums for each output
#endif
  void begin(int32_t offset, const uint8_t* zeros) {
    for (auto& sum : total) sum = vdupq_n_s32(0);
    if constexpr (kBits == 4) {
      const uint8x16_t bytes = vld1q_u8(zeros);
      const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
      const uint16x4_t fours[4] = {vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)};
      for (int i = 0; i < 4; ++i) start[i] = vmulq_n_s32(vreinterpretq_s32_u32(vmovl_u16(fours[i])), offset);
    } else {
      for (auto& sum : start) sum = vdupq_n_s32(0);
    }
  }
  void add(Codes codes, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof(four));
    const int8x16_t inputs4 = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int i = 0; i < 4; ++i) {
      const int8x16_t c = vreinterpretq_s8_u8(codes.v[i]);
#if defined(__ARM_FEATURE_DOTPROD)
      total[i] = vdotq_s32(total[i], c, inputs4);
#else
      total[2 * i] = vpadalq_s16(total[2 * i], vmull_s8(vget_low_s8(c), vget_low_s8(inputs4)));
      total[2 * i + 1] = vpadalq_s16(total[2 * i + 1], vmull_high_s8(c, inputs4));
#endif
    }
  }
  F16 sums() const {
    return each([&](int i) {
#if defined(__ARM_FEATURE_DOTPROD)
      return vcvtq_f32_s32(vaddq_s32(start[i], total[i]));
#else
      return vcvtq_f32_s32(vaddq_s32(start[i], vpaddq_s32(total[2 * i], total[2 * i + 1])));
#endif
    });
  }
};

inline int32_t store_rounded(int8_t* p, F16 a) {
  const auto whole = [&](int i) { return vqmovn_s32(vcvtnq_s32_f32(a.v[i])); };
  const int16x8_t low = vcombine_s16(whole(0), whole(1)), high = vcombine_s16(whole(2), whole(3));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  return vaddlvq_s16(vaddq_s16(low, high));
}
constexpr int kRowsAtOnce = 4;

#endif

}  // namespace draftline::DRAFTLINE_ISA

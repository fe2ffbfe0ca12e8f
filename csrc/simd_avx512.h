// Sixteen lanes, one a row of a panel, in one AVX-512 register. Included by *_avx512.cc only.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "format.h"

namespace tidegate {

struct Avx512 {
  static constexpr int kTileTokens = 4, kTilePanels = 2;
  using F = __m512;
  using I = __m512i;

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static F load_half(const std::uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_int8(const std::uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static F load_bits(const std::uint8_t* p) { return _mm512_castsi512_ps(_mm512_loadu_si512(p)); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store_first(float* p, F x, int count) {
    if (count == 16) return store(p, x);
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), x);
  }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // Of the two operands the second one is returned if either is not a number, as std::max(b, a) would.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static float max_lane(F a) { return _mm512_reduce_max_ps(a); }

  static F from_int(I a) { return _mm512_cvtepi32_ps(a); }
  static I to_int(F a) { return _mm512_cvtps_epi32(a); }
  static I set_int(std::int32_t x) { return _mm512_set1_epi32(x); }
  static std::int32_t sum_lanes(I a) { return _mm512_reduce_add_epi32(a); }
  static void store_bytes(std::int8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  // 2^n for whole n in [-126, 127].
  static F pow2(F n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(to_int(n), set_int(127)), 23)); }
  // The even (low halves) and odd (high halves) bfloat16 numbers of 16 pairs.
  static F bf16_even(F pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
  static F bf16_odd(F pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), set_int(static_cast<int>(0xFFFF0000u))));
  }

  // 64 codes, four a row. All kinds are unsigned bytes here: MXFP4 values are stored plus 12.
  using Codes = __m512i;
  // Four inputs of a token, for every row.
  using Inputs = __m512i;
  static Inputs load_inputs(const std::int8_t* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  static constexpr int sum_factor(Kind kind, bool has_min) {
    return has_min ? 1 : kind == Kind::int8 ? -128 : kind == Kind::int4 ? -8 : -12;
  }
  template <Kind kKind, bool kMin>
  static Codes load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
  template <Kind kKind>
  static void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
    const __m512i mask = _mm512_set1_epi8(15), both = _mm512_loadu_si512(p);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if constexpr (kKind == Kind::mxfp4) {
      const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
      low = _mm512_shuffle_epi8(values, low);
      high = _mm512_shuffle_epi8(values, high);
    }
  }
  // The integer sum of one group for one token.
  template <Kind kKind, bool kMin>
  struct Dot {
    __m512i sum;
    void start(std::int32_t group_sum) { sum = kMin ? _mm512_setzero_si512() : _mm512_set1_epi32(group_sum); }
    void add(const Codes& w, const Inputs& x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
    void end_chunk() {}
    I total() const { return sum; }
  };
};

}  // namespace tidegate

// Sixteen lanes, one a row of a panel, in two AVX2 registers. Included by *_avx2.cc only.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "format.h"

namespace tidegate {

struct Avx2 {
  static constexpr int kTileTokens = 4, kTilePanels = 1;
  struct F { __m256 a, b; };
  struct I { __m256i a, b; };

  static F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static F load_half(const std::uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
  }
  static F load_int8(const std::uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
  }
  static F load_bits(const std::uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static void store_first(float* p, F x, int count) {
    if (count == 16) return store(p, x);
    float all[16];
    store(all, x);
    for (int i = 0; i < count; ++i) p[i] = all[i];
  }
  static F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
  static F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static F abs(F x) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
  }
  static F round(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
  }
  static float max_lane(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
  }

  static F from_int(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  static I set_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static std::int32_t sum_lanes(I x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
  }
  static void store_bytes(std::int8_t* p, I x) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  }
  static F pow2(F n) {
    const I bits = to_int(n);
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(bits.a, bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(bits.b, bias), 23))};
  }
  static F bf16_even(F pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.a), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.b), 16))};
  }
  static F bf16_odd(F pairs) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
    return {_mm256_and_ps(pairs.a, mask), _mm256_and_ps(pairs.b, mask)};
  }

  // 64 codes, four a row. int4 codes are unsigned bytes; int8 and MXFP4 are signed numbers beside their magnitudes,
  // because vpmaddubsw wants one unsigned operand and its 16-bit sums must not saturate.
  struct Codes { __m256i a, b, abs_a, abs_b; };
  // Four inputs of a token, for every row.
  using Inputs = __m256i;
  static Inputs load_inputs(const std::int8_t* p) {
    std::int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  static constexpr bool is_signed(Kind kind) { return kind != Kind::int4; }
  static constexpr int sum_factor(Kind kind, bool has_min) { return has_min ? 1 : kind == Kind::int4 ? -8 : 0; }

  template <Kind kKind, bool kMin>
  static Codes load_codes(const std::uint8_t* p) {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    return with_magnitudes(_mm256_xor_si256(load256(p), flip), _mm256_xor_si256(load256(p + 32), flip));
  }
  template <Kind kKind>
  static void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
    const __m256i mask = _mm256_set1_epi8(15), a = load256(p), b = load256(p + 32);
    const __m256i low_a = _mm256_and_si256(a, mask), low_b = _mm256_and_si256(b, mask);
    const __m256i high_a = _mm256_and_si256(_mm256_srli_epi16(a, 4), mask);
    const __m256i high_b = _mm256_and_si256(_mm256_srli_epi16(b, 4), mask);
    if constexpr (kKind == Kind::mxfp4) {
      const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kMxfp4Values)));
      low = with_magnitudes(_mm256_shuffle_epi8(values, low_a), _mm256_shuffle_epi8(values, low_b));
      high = with_magnitudes(_mm256_shuffle_epi8(values, high_a), _mm256_shuffle_epi8(values, high_b));
    } else {
      low = {low_a, low_b, low_a, low_b};
      high = {high_a, high_b, high_a, high_b};
    }
  }
  template <Kind kKind, bool kMin>
  struct Dot {
    I sum;
    I words;  // 16-bit partial sums; those of 32 inputs fit: 8 * 2 * 15 * 127 < 32768
    void start(std::int32_t group_sum) {
      if (kMin)  // int8 codes lost 128 in load_codes, which with minima is not what the contract subtracts
        sum = set_int(kKind == Kind::int8 ? group_sum * 128 : 0);
      else
        sum = set_int(is_signed(kKind) ? 0 : group_sum);
      words = set_int(0);
    }
    void add(const Codes& w, const Inputs& inputs) {
      I products;
      if constexpr (is_signed(kKind))
        products = {_mm256_maddubs_epi16(w.abs_a, _mm256_sign_epi8(inputs, w.a)),
                    _mm256_maddubs_epi16(w.abs_b, _mm256_sign_epi8(inputs, w.b))};
      else
        products = {_mm256_maddubs_epi16(w.a, inputs), _mm256_maddubs_epi16(w.b, inputs)};
      words = {_mm256_add_epi16(words.a, products.a), _mm256_add_epi16(words.b, products.b)};
      if constexpr (kKind == Kind::int8) end_chunk();
    }
    void end_chunk() {
      const __m256i ones = _mm256_set1_epi16(1);
      sum = {_mm256_add_epi32(sum.a, _mm256_madd_epi16(words.a, ones)),
             _mm256_add_epi32(sum.b, _mm256_madd_epi16(words.b, ones))};
      words = set_int(0);
    }
    I total() const { return sum; }
  };

 private:
  static __m256i load256(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static Codes with_magnitudes(__m256i a, __m256i b) { return {a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)}; }
};

}  // namespace tidegate

// The sixteen lanes of simd.h in two AVX2 registers. Included by that file only.
#pragma once

namespace tidegate {
namespace {

constexpr int kTileTokens = 4, kTilePanels = 1;

struct Vec16 {
  __m256 lo, hi;
};

TIDEGATE_INLINE __m256i first_lanes(int n) {  // all ones in lanes 0..n-1 of 8, for any n
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TIDEGATE_INLINE Vec16 broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TIDEGATE_INLINE Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TIDEGATE_INLINE Vec16 load(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
TIDEGATE_INLINE Vec16 load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
TIDEGATE_INLINE Vec16 load_first(const Half* p, int n) {
  Half all[16] = {};
  for (int i = 0; i < n; ++i) all[i] = p[i];
  return load(all);
}
TIDEGATE_INLINE Vec16 load(const Int8* p) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
TIDEGATE_INLINE Vec16 load_first(const Int8* p, int n) {
  Int8 all[16] = {};
  for (int i = 0; i < n; ++i) all[i] = p[i];
  return load(all);
}
TIDEGATE_INLINE void store(float* p, Vec16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
TIDEGATE_INLINE void store_first(float* p, Vec16 a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), a.hi);
}
TIDEGATE_INLINE void store(Half* p, Vec16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TIDEGATE_INLINE Vec16 operator+(Vec16 a, Vec16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 operator-(Vec16 a, Vec16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 operator*(Vec16 a, Vec16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 operator/(Vec16 a, Vec16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 fma(Vec16 a, Vec16 b, Vec16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TIDEGATE_INLINE Vec16 min(Vec16 a, Vec16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 max(Vec16 a, Vec16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
TIDEGATE_INLINE Vec16 abs(Vec16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  const __m256 lo = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first), first_lanes(last)));
  const __m256 hi = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first - 8), first_lanes(last - 8)));
  return {_mm256_blendv_ps(other.lo, a.lo, lo), _mm256_blendv_ps(other.hi, a.hi, hi)};
}
TIDEGATE_INLINE __m256 exp2_of(__m256 biased) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
}
TIDEGATE_INLINE Vec16 exp2_of(Vec16 biased) { return {exp2_of(biased.lo), exp2_of(biased.hi)}; }
TIDEGATE_INLINE Vec16 keep_from(Vec16 a, Vec16 x, Vec16 floor) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.lo, floor.lo, _CMP_NLT_UQ), a.lo),
          _mm256_and_ps(_mm256_cmp_ps(x.hi, floor.hi, _CMP_NLT_UQ), a.hi)};
}
TIDEGATE_INLINE Vec16 bf16_even(Vec16 pairs) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.hi), 16))};
}
TIDEGATE_INLINE Vec16 bf16_odd(Vec16 pairs) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFFFF0000u)));
  return {_mm256_and_ps(pairs.lo, mask), _mm256_and_ps(pairs.hi, mask)};
}
TIDEGATE_INLINE __m256 low_half(Vec16 a) { return a.lo; }
TIDEGATE_INLINE __m256 high_half(Vec16 a) { return a.hi; }

struct Ints {
  __m256i lo, hi;
};

TIDEGATE_INLINE Ints broadcast_int(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TIDEGATE_INLINE Vec16 to_float(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
TIDEGATE_INLINE Ints to_int(Vec16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
TIDEGATE_INLINE std::int32_t sum_of(Ints a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
TIDEGATE_INLINE void store_bytes(Int8* p, Ints a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// int4 codes are unsigned bytes; int8 and MXFP4 are signed numbers beside their magnitudes,
// because vpmaddubsw wants one unsigned operand and its 16-bit sums must not saturate.
struct Codes { __m256i a, b, abs_a, abs_b; };
TIDEGATE_INLINE __m256i load256(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
TIDEGATE_INLINE Codes with_magnitudes(__m256i a, __m256i b) { return {a, b, _mm256_abs_epi8(a), _mm256_abs_epi8(b)}; }
using Inputs = __m256i;
TIDEGATE_INLINE Inputs load_inputs(const std::int8_t* p) {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}
constexpr bool is_signed(Kind kind) { return kind != Kind::int4; }
constexpr int sum_factor(Kind kind, bool has_min) { return has_min ? 1 : kind == Kind::int4 ? -8 : 0; }

TIDEGATE_INLINE Codes load_codes(const std::uint8_t* p) {
  const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
  return with_magnitudes(_mm256_xor_si256(load256(p), flip), _mm256_xor_si256(load256(p + 32), flip));
}
template <Kind kKind>
TIDEGATE_INLINE void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
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
  Ints sum;
  Ints words;  // 16-bit partial sums; those of 32 inputs fit: 8 * 2 * 15 * 127 < 32768
  TIDEGATE_INLINE void start(std::int32_t group_sum) {
    if (kMin)  // int8 codes lost 128 in load_codes, which with minima is not what the contract subtracts
      sum = broadcast_int(kKind == Kind::int8 ? group_sum * 128 : 0);
    else
      sum = broadcast_int(is_signed(kKind) ? 0 : group_sum);
    words = broadcast_int(0);
  }
  TIDEGATE_INLINE void add(const Codes& w, const Inputs& inputs) {
    Ints products;
    if constexpr (is_signed(kKind))
      products = {_mm256_maddubs_epi16(w.abs_a, _mm256_sign_epi8(inputs, w.a)),
                  _mm256_maddubs_epi16(w.abs_b, _mm256_sign_epi8(inputs, w.b))};
    else
      products = {_mm256_maddubs_epi16(w.a, inputs), _mm256_maddubs_epi16(w.b, inputs)};
    words = {_mm256_add_epi16(words.lo, products.lo), _mm256_add_epi16(words.hi, products.hi)};
    if constexpr (kKind == Kind::int8) end_chunk();
  }
  TIDEGATE_INLINE void end_chunk() {
    const __m256i ones = _mm256_set1_epi16(1);
    sum = {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(words.lo, ones)),
           _mm256_add_epi32(sum.hi, _mm256_madd_epi16(words.hi, ones))};
    words = broadcast_int(0);
  }
  TIDEGATE_INLINE Ints total() const { return sum; }
};

}  // namespace
}  // namespace tidegate

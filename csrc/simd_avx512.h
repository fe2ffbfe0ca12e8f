// The sixteen lanes of simd.h in one AVX-512 register. Included by that file only.
#pragma once

namespace tidegate {
namespace {

constexpr int kTileTokens = 4, kTilePanels = 2;

struct Vec16 {
  __m512 v;
};

TIDEGATE_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

TIDEGATE_INLINE Vec16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
TIDEGATE_INLINE Vec16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
TIDEGATE_INLINE Vec16 load(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TIDEGATE_INLINE Vec16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
TIDEGATE_INLINE Vec16 load_first(const Half* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
TIDEGATE_INLINE Vec16 load(const Int8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
TIDEGATE_INLINE Vec16 load_first(const Int8* p, int n) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p)))};
}
TIDEGATE_INLINE void store(float* p, Vec16 a) { _mm512_storeu_ps(p, a.v); }
TIDEGATE_INLINE void store_first(float* p, Vec16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
TIDEGATE_INLINE void store(Half* p, Vec16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
TIDEGATE_INLINE Vec16 operator+(Vec16 a, Vec16 b) { return {_mm512_add_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 operator-(Vec16 a, Vec16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 operator*(Vec16 a, Vec16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 operator/(Vec16 a, Vec16 b) { return {_mm512_div_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
TIDEGATE_INLINE Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 abs(Vec16 a) { return {_mm512_abs_ps(a.v)}; }
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(first_lanes(last) & ~first_lanes(first)), a.v)};
}
TIDEGATE_INLINE Vec16 exp2_of(Vec16 biased) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)))};
}
TIDEGATE_INLINE Vec16 keep_from(Vec16 a, Vec16 x, Vec16 floor) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, floor.v, _CMP_NLT_UQ), a.v)};
}
TIDEGATE_INLINE Vec16 bf16_even(Vec16 pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))}; }
TIDEGATE_INLINE Vec16 bf16_odd(Vec16 pairs) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.v), mask))};
}
// rows[i] lane j becomes rows[j] lane i.
TIDEGATE_INLINE void transpose(Vec16 rows[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
    a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const __m512d lo = _mm512_castps_pd(a[4 * i + j]), hi = _mm512_castps_pd(a[4 * i + j + 2]);
      b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
      b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
    }
  }
  for (int i = 0; i < 4; ++i) {  // b[4q + i] holds column 4l + i of rows 4q..4q+3 in its 128-bit part l
    const __m512 lo01 = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x44), hi01 = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xee);
    const __m512 lo23 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x44), hi23 = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xee);
    rows[i].v = _mm512_shuffle_f32x4(lo01, lo23, 0x88);
    rows[4 + i].v = _mm512_shuffle_f32x4(lo01, lo23, 0xdd);
    rows[8 + i].v = _mm512_shuffle_f32x4(hi01, hi23, 0x88);
    rows[12 + i].v = _mm512_shuffle_f32x4(hi01, hi23, 0xdd);
  }
}
TIDEGATE_INLINE __m256 low_half(Vec16 a) { return _mm512_castps512_ps256(a.v); }
TIDEGATE_INLINE __m256 high_half(Vec16 a) { return _mm512_extractf32x8_ps(a.v, 1); }

struct Ints {
  __m512i v;
};

TIDEGATE_INLINE Ints broadcast_int(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
TIDEGATE_INLINE Vec16 to_float(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
TIDEGATE_INLINE Ints to_int(Vec16 a) { return {_mm512_cvtps_epi32(a.v)}; }
TIDEGATE_INLINE std::int32_t sum_of(Ints a) { return _mm512_reduce_add_epi32(a.v); }
TIDEGATE_INLINE void store_bytes(Int8* p, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// All kinds are unsigned bytes here: MXFP4 values are stored plus 12.
using Codes = __m512i;
using Inputs = __m512i;
TIDEGATE_INLINE Inputs load_inputs(const std::int8_t* p) {
  std::int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}
constexpr int sum_factor(Kind kind, bool has_min) {
  return has_min ? 1 : kind == Kind::int8 ? -128 : kind == Kind::int4 ? -8 : -12;
}
TIDEGATE_INLINE Codes load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
template <Kind kKind>
TIDEGATE_INLINE void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
  const __m512i mask = _mm512_set1_epi8(15), both = _mm512_loadu_si512(p);
  low = _mm512_and_si512(both, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  if constexpr (kKind == Kind::mxfp4) {
    const __m512i values = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    low = _mm512_shuffle_epi8(values, low);
    high = _mm512_shuffle_epi8(values, high);
  }
}
template <Kind kKind, bool kMin>
struct Dot {
  __m512i sum;
  TIDEGATE_INLINE void start(std::int32_t group_sum) { sum = kMin ? _mm512_setzero_si512() : _mm512_set1_epi32(group_sum); }
  TIDEGATE_INLINE void add(const Codes& w, const Inputs& x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
  TIDEGATE_INLINE void end_chunk() {}
  TIDEGATE_INLINE Ints total() const { return {sum}; }
};

}  // namespace
}  // namespace tidegate

// Sixteen float32 lanes, written once for every instruction set: kernels include this file in a *_avx512.cc, *_avx2.cc or
// *_portable.cc and compile to that set. Lane for lane and bit for bit the results are the same everywhere: fma is fused
// (in software where the processor has none), sums across lanes use one tree, exp is the same polynomial.
//
// Everything is in an anonymous namespace: a function shared by name between instruction sets would be merged by the linker.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#pragma GCC diagnostic push  // GCC 12 warns about its own header (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define TIDEGATE_INLINE inline __attribute__((always_inline))

namespace tidegate {
namespace {

using Half = std::uint16_t;  // the bits of a float16
using Int8 = std::int8_t;
constexpr int kLanes = 16;
constexpr float kHalfMax = 65504.0f;

// ---- what each instruction set brings ---------------------------------------------------------------------------------

#if defined(__AVX512F__)

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
// min and max return b where either is not a number.
TIDEGATE_INLINE Vec16 min(Vec16 a, Vec16 b) { return {_mm512_min_ps(a.v, b.v)}; }
TIDEGATE_INLINE Vec16 max(Vec16 a, Vec16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// Lanes first..last-1 of a, `other` elsewhere.
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(first_lanes(last) & ~first_lanes(first)), a.v)};
}
// 2^n where x >= floor, else 0, for the integer n in the low bits of biased = n + 1.5 * 2^23.
TIDEGATE_INLINE Vec16 power_of_two(Vec16 biased, Vec16 x, Vec16 floor) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(biased.v), 23);
  const __m512i bits = _mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23));
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, floor.v, _CMP_NLT_UQ), _mm512_castsi512_ps(bits))};
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
TIDEGATE_INLINE void lanes_of(Vec16 a, float out[16]) { _mm512_storeu_ps(out, a.v); }

#elif defined(__AVX2__)

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
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  const __m256 lo = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first), first_lanes(last)));
  const __m256 hi = _mm256_castsi256_ps(_mm256_andnot_si256(first_lanes(first - 8), first_lanes(last - 8)));
  return {_mm256_blendv_ps(other.lo, a.lo, lo), _mm256_blendv_ps(other.hi, a.hi, hi)};
}
TIDEGATE_INLINE __m256 power_of_two_8(__m256 biased, __m256 x, __m256 floor) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(biased), 23);
  const __m256i bits = _mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23));
  return _mm256_and_ps(_mm256_cmp_ps(x, floor, _CMP_NLT_UQ), _mm256_castsi256_ps(bits));
}
TIDEGATE_INLINE Vec16 power_of_two(Vec16 biased, Vec16 x, Vec16 floor) {
  return {power_of_two_8(biased.lo, x.lo, floor.lo), power_of_two_8(biased.hi, x.hi, floor.hi)};
}
TIDEGATE_INLINE void lanes_of(Vec16 a, float out[16]) { store(out, a); }

#else

struct Vec16 {
  float v[16];
};

TIDEGATE_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
TIDEGATE_INLINE float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
TIDEGATE_INLINE float float_from_half(Half h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | ((rest & 0x3ff) << 13) | (rest > 0x7c00 ? 0x400000 : 0));
  // The exponent is rebiased by a multiplication, which also makes subnormals right.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}
TIDEGATE_INLINE Half half_from_float(float x) {
  const std::uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<Half>(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
  if (rest >= 0x477ff000) return static_cast<Half>(sign | 0x7c00);
  if (rest < 0x38800000)  // subnormal or zero: adding 0.5 lets the float32 addition round to units of 2^-24
    return static_cast<Half>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  return static_cast<Half>(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
}

#define TIDEGATE_LANES(expression)            \
  Vec16 out;                                  \
  for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
  return out
TIDEGATE_INLINE Vec16 broadcast(float x) { TIDEGATE_LANES(x); }
TIDEGATE_INLINE Vec16 load(const float* p) { TIDEGATE_LANES(p[i]); }
TIDEGATE_INLINE Vec16 load(const Half* p) { TIDEGATE_LANES(float_from_half(p[i])); }
TIDEGATE_INLINE Vec16 load_first(const float* p, int n) { TIDEGATE_LANES(i < n ? p[i] : 0.0f); }
TIDEGATE_INLINE Vec16 load_first(const Half* p, int n) { TIDEGATE_LANES(i < n ? float_from_half(p[i]) : 0.0f); }
TIDEGATE_INLINE Vec16 load(const Int8* p) { TIDEGATE_LANES(static_cast<float>(p[i])); }
TIDEGATE_INLINE Vec16 load_first(const Int8* p, int n) { TIDEGATE_LANES(i < n ? static_cast<float>(p[i]) : 0.0f); }
TIDEGATE_INLINE void store(float* p, Vec16 a) { std::memcpy(p, a.v, sizeof a.v); }
TIDEGATE_INLINE void store_first(float* p, Vec16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
TIDEGATE_INLINE void store(Half* p, Vec16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = half_from_float(a.v[i]);
}
TIDEGATE_INLINE Vec16 operator+(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] + b.v[i]); }
TIDEGATE_INLINE Vec16 operator-(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] - b.v[i]); }
TIDEGATE_INLINE Vec16 operator*(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] * b.v[i]); }
TIDEGATE_INLINE Vec16 operator/(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] / b.v[i]); }
TIDEGATE_INLINE Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { TIDEGATE_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
TIDEGATE_INLINE Vec16 min(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
TIDEGATE_INLINE Vec16 max(Vec16 a, Vec16 b) { TIDEGATE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  TIDEGATE_LANES(first <= i && i < last ? a.v[i] : other.v[i]);
}
TIDEGATE_INLINE Vec16 power_of_two(Vec16 biased, Vec16 x, Vec16 floor) {
  TIDEGATE_LANES(x.v[i] < floor.v[i] ? 0.0f : float_of((bits_of(biased.v[i]) << 23) + (127u << 23)));
}
#undef TIDEGATE_LANES
TIDEGATE_INLINE void lanes_of(Vec16 a, float out[16]) { store(out, a); }

#endif

#if !defined(__AVX512F__)
TIDEGATE_INLINE void transpose(Vec16 rows[16]) {
  float in[16][16], out[16];
  for (int i = 0; i < 16; ++i) lanes_of(rows[i], in[i]);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) out[j] = in[j][i];
    rows[i] = load(out);
  }
}
#endif

// ---- the same for all --------------------------------------------------------------------------------------------------

// Sum of the lanes: lane i + lane i+8, then +4, +2, +1.
TIDEGATE_INLINE float sum_of(Vec16 a) {
#if defined(__AVX512F__)
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#elif defined(__AVX2__)
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
#endif
#if defined(__AVX512F__) || defined(__AVX2__)
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
#else
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
#endif
}

TIDEGATE_INLINE float max_of(Vec16 a) {
  float lanes[16];
  lanes_of(a, lanes);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

// e^x within 1 ulp for -87.33 <= x <= 88.3; 0 below (also for -infinity), a large finite number above, NaN for NaN.
TIDEGATE_INLINE Vec16 exp_of(Vec16 x) {
  const Vec16 floor = broadcast(-87.33f), magic = broadcast(0x1.8p23f);
  x = min(broadcast(88.3f), x);
  const Vec16 safe = max(floor, x);
  const Vec16 biased = fma(safe, broadcast(1.44269504f), magic);
  const Vec16 n = biased - magic;
  Vec16 r = fma(n, broadcast(-0.693145751953125f), safe);
  r = fma(n, broadcast(-1.428606765330187e-06f), r);
  Vec16 y = fma(broadcast(0x1.a151bcp-13f), r, broadcast(0x1.6d4366p-10f));
  y = fma(y, r, broadcast(0x1.1110c6p-7f));
  y = fma(y, r, broadcast(0x1.5554e8p-5f));
  y = fma(y, r, broadcast(0x1.555556p-3f));
  y = fma(y, r, broadcast(0.5f));
  y = fma(y, r * r, r) + broadcast(1.0f);
  return y * power_of_two(biased, x, floor);
}

// e^x of one number, the same bits as in a lane of exp_of.
TIDEGATE_INLINE float exp_one(float x) {
  float lanes[16];
  lanes_of(exp_of(broadcast(x)), lanes);
  return lanes[0];
}

// Float16 bits, values beyond its range stored as its largest finite ones.
TIDEGATE_INLINE void store_clamped(Half* p, Vec16 a) {
  store(p, max(broadcast(-kHalfMax), min(broadcast(kHalfMax), a)));
}

}  // namespace
}  // namespace tidegate

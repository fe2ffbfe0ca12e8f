// Sixteen lanes, one a row of a panel or one a number of a row. Kernels include this file in a *_avx512.cc, *_amx.cc, *_avx2.cc or
// *_portable.cc, are written once, and compile to that instruction set. Lane for lane and bit for bit the results are the same
// everywhere: fma is fused (in software where the processor has none), sums across lanes use one tree, exp is the same polynomial,
// sums of codes are exact.
//
// Everything is in an anonymous namespace: a function shared by name between instruction sets would be merged by the linker.
//
// simd_*.h bring, for sixteen float32 (Vec16) and sixteen int32 (Ints):
//   broadcast, load, load_first (zeros behind the first n lanes), store, store_first   of float, and load of Half and Int8
//   + - * / fma, min, max (b where either is not a number), abs, keep_lanes (lanes first..last-1 of a, `other` elsewhere), transpose
//   exp2_of (2^n, given n + kWhole for a whole n from -126 to 127), keep_from (a where x is not below `floor`, else 0)
//   bf16_even, bf16_odd (the low and the high halves of sixteen pairs)
//   to_float, to_int (to nearest even, of less than 2^23), broadcast_int, sum_of, store_bytes (of -128..127)
// and for products of packed codes with inputs:
//   kTileTokens, kTilePanels   accumulators that fit into registers
//   Codes     64 codes, four a row, as numbers that suit the instructions; load_codes (int8), load_nibbles (int4, mxfp4)
//   Inputs    four inputs of a token, for every row; load_inputs
//   Dot       the integer sum of one group for one token: start, add, end_chunk (after 16 or 32 inputs), total
//   sum_factor   what the sum of a group's inputs is multiplied by before it enters Dot::start
#pragma once
#include <cstdint>
#include <cstring>

#include "format.h"

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
// Added to a number below 2^22 it leaves no fraction: the unit in the last place of the sum is 1.
constexpr float kWhole = 0x1.8p23f;

// Packed weights as what they are.
template <class T>
TIDEGATE_INLINE const T* as(const std::uint8_t* p) {
  return reinterpret_cast<const T*>(p);
}

}  // namespace
}  // namespace tidegate

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace tidegate {
namespace {

#if !defined(__AVX512F__)
TIDEGATE_INLINE void transpose(Vec16 rows[16]) {
  float in[16][16], out[16];
  for (int i = 0; i < 16; ++i) store(in[i], rows[i]);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) out[j] = in[j][i];
    rows[i] = load(out);
  }
}
#endif

TIDEGATE_INLINE Vec16 load_up_to(const float* p, int lanes) { return lanes == kLanes ? load(p) : load_first(p, lanes); }
TIDEGATE_INLINE void store_up_to(float* p, Vec16 a, int lanes) {
  if (lanes == kLanes)
    store(p, a);
  else
    store_first(p, a, lanes);
}

// Across the lanes in one tree: lane i and lane i + 8, then + 4, + 2, + 1.
#if defined(__AVX2__)
TIDEGATE_INLINE float sum_of(Vec16 a) {
  const __m256 s8 = _mm256_add_ps(low_half(a), high_half(a));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}
TIDEGATE_INLINE float max_of(Vec16 a) {
  const __m256 m8 = _mm256_max_ps(low_half(a), high_half(a));
  const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
  const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
  return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
#else
TIDEGATE_INLINE float sum_of(Vec16 a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
TIDEGATE_INLINE float max_of(Vec16 a) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
#endif

// e^x within 1 ulp for -87.33 <= x <= 88.3; 0 below (also for -infinity), a large finite number above, NaN for NaN.
TIDEGATE_INLINE Vec16 exp_of(Vec16 x) {
  const Vec16 floor = broadcast(-87.33f), whole = broadcast(kWhole);
  x = min(broadcast(88.3f), x);
  const Vec16 safe = max(floor, x);
  const Vec16 biased = fma(safe, broadcast(1.44269504f), whole);
  const Vec16 n = biased - whole;
  Vec16 r = fma(n, broadcast(-0.693145751953125f), safe);
  r = fma(n, broadcast(-1.428606765330187e-06f), r);
  Vec16 y = fma(broadcast(0x1.a151bcp-13f), r, broadcast(0x1.6d4366p-10f));
  y = fma(y, r, broadcast(0x1.1110c6p-7f));
  y = fma(y, r, broadcast(0x1.5554e8p-5f));
  y = fma(y, r, broadcast(0x1.555556p-3f));
  y = fma(y, r, broadcast(0.5f));
  y = fma(y, r * r, r) + broadcast(1.0f);
  return y * keep_from(exp2_of(biased), x, floor);
}

// e^x of one number, the same bits as in a lane of exp_of.
TIDEGATE_INLINE float exp_one(float x) {
  float lanes[kLanes];
  store(lanes, exp_of(broadcast(x)));
  return lanes[0];
}

// Float16 bits, values beyond its range stored as its largest finite ones.
TIDEGATE_INLINE void store_clamped(Half* p, Vec16 a) {
  store(p, max(broadcast(-kHalfMax), min(broadcast(kHalfMax), a)));
}

}  // namespace
}  // namespace tidegate

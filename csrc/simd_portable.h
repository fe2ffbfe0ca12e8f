// The sixteen lanes of simd.h in plain C++. Included by that file only.
#pragma once
#include "format.h"

namespace tidegate {
namespace {

constexpr int kTileTokens = 2, kTilePanels = 1;

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

#define TIDEGATE_LANES(Type, expression)                    \
  Type out;                                                 \
  for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
  return out
TIDEGATE_INLINE Vec16 broadcast(float x) { TIDEGATE_LANES(Vec16, x); }
TIDEGATE_INLINE Vec16 load(const float* p) {
  Vec16 out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
TIDEGATE_INLINE Vec16 load(const Half* p) { TIDEGATE_LANES(Vec16, float_from_half(p[i])); }
TIDEGATE_INLINE Vec16 load_first(const float* p, int n) { TIDEGATE_LANES(Vec16, i < n ? p[i] : 0.0f); }
TIDEGATE_INLINE Vec16 load_first(const Half* p, int n) { TIDEGATE_LANES(Vec16, i < n ? float_from_half(p[i]) : 0.0f); }
TIDEGATE_INLINE Vec16 load(const Int8* p) { TIDEGATE_LANES(Vec16, static_cast<float>(p[i])); }
TIDEGATE_INLINE Vec16 load_first(const Int8* p, int n) { TIDEGATE_LANES(Vec16, i < n ? static_cast<float>(p[i]) : 0.0f); }
TIDEGATE_INLINE void store(float* p, Vec16 a) { std::memcpy(p, a.v, sizeof a.v); }
TIDEGATE_INLINE void store_first(float* p, Vec16 a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
TIDEGATE_INLINE void store(Half* p, Vec16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = half_from_float(a.v[i]);
}
TIDEGATE_INLINE Vec16 operator+(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] + b.v[i]); }
TIDEGATE_INLINE Vec16 operator-(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] - b.v[i]); }
TIDEGATE_INLINE Vec16 operator*(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] * b.v[i]); }
TIDEGATE_INLINE Vec16 operator/(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] / b.v[i]); }
TIDEGATE_INLINE Vec16 fma(Vec16 a, Vec16 b, Vec16 c) { TIDEGATE_LANES(Vec16, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
TIDEGATE_INLINE Vec16 min(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
TIDEGATE_INLINE Vec16 max(Vec16 a, Vec16 b) { TIDEGATE_LANES(Vec16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
TIDEGATE_INLINE Vec16 abs(Vec16 a) { TIDEGATE_LANES(Vec16, __builtin_fabsf(a.v[i])); }
TIDEGATE_INLINE Vec16 keep_lanes(Vec16 a, int first, int last, Vec16 other) {
  TIDEGATE_LANES(Vec16, first <= i && i < last ? a.v[i] : other.v[i]);
}
TIDEGATE_INLINE Vec16 exp2_of(Vec16 biased) { TIDEGATE_LANES(Vec16, float_of((bits_of(biased.v[i]) << 23) + (127u << 23))); }
TIDEGATE_INLINE Vec16 keep_from(Vec16 a, Vec16 x, Vec16 floor) { TIDEGATE_LANES(Vec16, x.v[i] < floor.v[i] ? 0.0f : a.v[i]); }
TIDEGATE_INLINE Vec16 bf16_even(Vec16 pairs) { TIDEGATE_LANES(Vec16, float_of(bits_of(pairs.v[i]) << 16)); }
TIDEGATE_INLINE Vec16 bf16_odd(Vec16 pairs) { TIDEGATE_LANES(Vec16, float_of(bits_of(pairs.v[i]) & 0xFFFF0000u)); }

struct Ints {
  std::int32_t v[16];
};

TIDEGATE_INLINE Ints broadcast_int(std::int32_t x) { TIDEGATE_LANES(Ints, x); }
TIDEGATE_INLINE Vec16 to_float(Ints a) { TIDEGATE_LANES(Vec16, static_cast<float>(a.v[i])); }
// Through the number whose unit in the last place is 1.
TIDEGATE_INLINE Ints to_int(Vec16 a) {
  TIDEGATE_LANES(Ints, static_cast<std::int32_t>(__builtin_copysignf((__builtin_fabsf(a.v[i]) + 0x1p23f) - 0x1p23f, a.v[i])));
}
TIDEGATE_INLINE std::int32_t sum_of(Ints a) {
  std::int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += a.v[i];
  return sum;
}
TIDEGATE_INLINE void store_bytes(Int8* p, Ints a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<Int8>(a.v[i]);
}

struct Codes {
  std::int16_t v[64];
};
// Twice, which makes one short vector.
struct Inputs {
  std::int16_t v[8];
};
TIDEGATE_INLINE Inputs load_inputs(const std::int8_t* p) { return {{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]}}; }
constexpr int sum_factor(Kind kind, bool has_min) {
  return has_min ? 1 : kind == Kind::int8 ? -128 : kind == Kind::int4 ? -8 : 0;
}
TIDEGATE_INLINE Codes load_codes(const std::uint8_t* p) {
  Codes out;
  for (int i = 0; i < 64; ++i) out.v[i] = p[i];
  return out;
}
template <Kind kKind>
TIDEGATE_INLINE void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
  for (int i = 0; i < 64; ++i) {
    low.v[i] = kKind == Kind::mxfp4 ? kMxfp4Values[p[i] & 15] : p[i] & 15;
    high.v[i] = kKind == Kind::mxfp4 ? kMxfp4Values[p[i] >> 4] : p[i] >> 4;
  }
}
// Sums stay apart until total(), so that the loop is element by element and compilers turn it into vector code.
template <Kind kKind, bool kMin>
struct Dot {
  std::int32_t parts[64];
  std::int32_t first;
  TIDEGATE_INLINE void start(std::int32_t group_sum) {
    first = kMin ? 0 : group_sum;
    for (std::int32_t& part : parts) part = 0;
  }
  TIDEGATE_INLINE void add(const Codes& w, const Inputs& x) {
    for (int i = 0; i < 64; i += 8)
      for (int j = 0; j < 8; ++j) parts[i + j] += w.v[i + j] * x.v[j];
  }
  TIDEGATE_INLINE void end_chunk() {}
  TIDEGATE_INLINE Ints total() const {
    TIDEGATE_LANES(Ints, first + parts[4 * i] + parts[4 * i + 1] + parts[4 * i + 2] + parts[4 * i + 3]);
  }
};
#undef TIDEGATE_LANES

}  // namespace
}  // namespace tidegate

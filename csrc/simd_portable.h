// Sixteen lanes, one a row of a panel, in plain C++. Included by *_portable.cc only.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "format.h"
#include "half.h"

namespace tidegate {

struct Portable {
  static constexpr int kTileTokens = 2, kTilePanels = 1;
  struct F { float v[16]; };
  struct I { std::int32_t v[16]; };

  template <class Out, class Op>
  static Out map(Op&& op) {
    Out out;
    for (int i = 0; i < 16; ++i) out.v[i] = op(i);
    return out;
  }
  static F zero() { return set(0); }
  static F set(float x) { return map<F>([&](int) { return x; }); }
  static F load(const float* p) { return map<F>([&](int i) { return p[i]; }); }
  static F load_half(const std::uint8_t* p) {
    std::uint16_t bits[16];
    std::memcpy(bits, p, sizeof bits);
    return map<F>([&](int i) { return half_to_float(bits[i]); });
  }
  static F load_int8(const std::uint8_t* p) {
    return map<F>([&](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
  }
  static F load_bits(const std::uint8_t* p) {
    F out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static void store(float* p, const F& x) { std::memcpy(p, x.v, sizeof x.v); }
  static void store_first(float* p, const F& x, int count) {
    for (int i = 0; i < count; ++i) p[i] = x.v[i];
  }
  static F add(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] + b.v[i]; }); }
  static F sub(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] - b.v[i]; }); }
  static F mul(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] * b.v[i]; }); }
  static F div(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] / b.v[i]; }); }
  static F fma(const F& a, const F& b, const F& c) {
    return map<F>([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
  }
  static F max(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  static F min(const F& a, const F& b) { return map<F>([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  static F abs(const F& a) { return map<F>([&](int i) { return __builtin_fabsf(a.v[i]); }); }
  // To nearest even, through the number whose unit in the last place is 1; |x| < 2^22, which is all the kernels need.
  static F round(const F& a) {
    return map<F>([&](int i) {
      const float shifted = __builtin_fabsf(a.v[i]) + 8388608.0f;
      return __builtin_copysignf(shifted - 8388608.0f, a.v[i]);
    });
  }
  static float max_lane(const F& a) {
    float out = a.v[0];
    for (int i = 1; i < 16; ++i) out = a.v[i] > out ? a.v[i] : out;
    return out;
  }

  static F from_int(const I& a) { return map<F>([&](int i) { return static_cast<float>(a.v[i]); }); }
  static I to_int(const F& a) {
    const F whole = round(a);
    return map<I>([&](int i) { return static_cast<std::int32_t>(whole.v[i]); });
  }
  static I set_int(std::int32_t x) { return map<I>([&](int) { return x; }); }
  static std::int32_t sum_lanes(const I& a) {
    std::int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += a.v[i];
    return sum;
  }
  static void store_bytes(std::int8_t* p, const I& a) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::int8_t>(a.v[i]);
  }
  static F pow2(const F& n) {
    const I whole = to_int(n);
    return from_bits([&](int i) { return static_cast<std::uint32_t>(whole.v[i] + 127) << 23; });
  }
  static F bf16_even(const F& pairs) {
    return from_bits([&](int i) { return bits_of(pairs.v[i]) << 16; });
  }
  static F bf16_odd(const F& pairs) {
    return from_bits([&](int i) { return bits_of(pairs.v[i]) & 0xFFFF0000u; });
  }

  // 64 codes, four a row, as the numbers that meet the inputs.
  struct Codes { std::int16_t v[64]; };
  // Four inputs of a token, twice, which makes one short vector.
  struct Inputs { std::int16_t v[8]; };
  static Inputs load_inputs(const std::int8_t* p) { return {{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]}}; }
  static constexpr int sum_factor(Kind kind, bool has_min) {
    return has_min ? 1 : kind == Kind::int8 ? -128 : kind == Kind::int4 ? -8 : 0;
  }
  template <Kind kKind, bool kMin>
  static Codes load_codes(const std::uint8_t* p) {
    Codes out;
    for (int i = 0; i < 64; ++i) out.v[i] = p[i];
    return out;
  }
  template <Kind kKind>
  static void load_nibbles(const std::uint8_t* p, Codes& low, Codes& high) {
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
    void start(std::int32_t group_sum) {
      first = kMin ? 0 : group_sum;
      for (std::int32_t& part : parts) part = 0;
    }
    void add(const Codes& w, const Inputs& x) {
      for (int i = 0; i < 64; i += 8)
        for (int j = 0; j < 8; ++j) parts[i + j] += w.v[i + j] * x.v[j];
    }
    void end_chunk() {}
    I total() const {
      return map<I>([&](int i) { return first + parts[4 * i] + parts[4 * i + 1] + parts[4 * i + 2] + parts[4 * i + 3]; });
    }
  };

 private:
  static std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
  }
  template <class Op>
  static F from_bits(Op&& op) {
    return map<F>([&](int i) {
      const std::uint32_t bits = op(i);
      float x;
      std::memcpy(&x, &bits, 4);
      return x;
    });
  }
};

}  // namespace tidegate

// One group of weights to codes, in vectors or in loops that a compiler turns into vector code. Included by
// quantize_{avx2,portable}.cc only. Every operation is one IEEE single operation, as in the numpy twin.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "half.h"
#include "quantize.h"
#include "simd.h"

namespace tidegate {
namespace {

// Clamps, then rounds to nearest even.
inline float clamped_round(float x, float low, float high) {
  x = x < low ? low : x > high ? high : x;
  return (x + kWhole) - kWhole;
}

inline float reciprocal(std::uint16_t scale) {
  const float wide = half_to_float(scale);
  return wide == 0 ? 0.0f : 1.0f / wide;
}

// w[0..16), zeros from `count` on.
TIDEGATE_INLINE Vec16 load_weights(const float* w, std::int64_t count) {
  return count >= kLanes ? load(w) : load_first(w, static_cast<int>(count));
}

float largest_magnitude(const float* w, std::int64_t count) {
  const Vec16 zero = broadcast(0.0f);
  Vec16 largest = zero;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec16 x = load_weights(w + i, count - i);
    largest = max(max(x, zero - x), largest);
  }
  return max_of(largest);
}

// The first weight of largest magnitude in steps of -8.
float scale_to_eight(const float* w, float largest) {
  int first = 0;
  while (__builtin_fabsf(w[first]) != largest) ++first;
  return w[first] / -8.0f;
}

GroupHeader quantize_symmetric(const float* w, int count, int offset, std::uint8_t* codes) {
  const float largest = largest_magnitude(w, count);
  const float scale = offset == 8 ? scale_to_eight(w, largest) : largest / 127.0f;
  const GroupHeader header{float_to_half(scale), 0, 0};
  const float inverse = reciprocal(header.scale), bound = static_cast<float>(offset);
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(clamped_round(w[i] * inverse, -bound, bound - 1)) + offset);
  return header;
}

GroupHeader quantize_affine(const float* w, int count, int levels, std::uint8_t* codes) {
  float low = w[0], high = w[0];
  for (int i = 1; i < count; ++i) {
    low = w[i] < low ? w[i] : low;
    high = w[i] > high ? w[i] : high;
  }
  const float top = static_cast<float>(levels);
  const GroupHeader header{float_to_half((high - low) / top), float_to_half(low), 0};
  const float inverse = reciprocal(header.scale), base = half_to_float(header.min);
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(clamped_round((w[i] - base) * inverse, 0, top)));
  return header;
}

// OCP MX: a power of two as scale, the nearest of eight magnitudes, ties to the even nibble.
GroupHeader quantize_mxfp4(const float* w, int count, std::uint8_t* codes) {
  const float largest = largest_magnitude(w, count);
  int exponent = 0;
  __builtin_frexpf(largest, &exponent);
  exponent = exponent - 4 < -24 ? -24 : exponent - 4 > 15 ? 15 : exponent - 4;
  const GroupHeader header{largest > 0 ? float_to_half(std::bit_cast<float>((exponent + 127) << 23)) : std::uint16_t{0}, 0, 0};
  const float inverse = reciprocal(header.scale);
  for (int i = 0; i < count; ++i) {
    const float x = __builtin_fabsf(w[i]) * inverse;
    const int nibble = (x > 0.5f) + (x >= 1.5f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f) + (x >= 7.0f) + (x > 10.0f);
    codes[i] = static_cast<std::uint8_t>(nibble | (w[i] < 0 && nibble > 0 ? 8 : 0));
  }
  return header;
}

// The codes of 16 weights, less their offset.
TIDEGATE_INLINE Vec16 codes_of(Vec16 w, float inverse) {
  const Vec16 whole = broadcast(kWhole);  // as in clamped_round
  return (min(max(w * broadcast(inverse), broadcast(-8.0f)), broadcast(7.0f)) + whole) - whole;
}

// The one with less error of two multipliers: under the first the largest weight is -8, under the second 7.
GroupHeader quantize_two_level(const float* w, int count, int group, float row_scale, std::uint8_t* codes) {
  const float ratio = scale_to_eight(w, largest_magnitude(w, count)) * (row_scale == 0 ? 0.0f : 1.0f / row_scale);
  Vec16 weights[kMaxGroup / kLanes];
  const int vectors = group / kLanes;
  for (int v = 0; v < vectors; ++v) weights[v] = load_weights(w + v * kLanes, std::max(0, count - v * kLanes));
  float best = 0, best_inverse = 0, least = __builtin_inff();
  for (const float factor : {1.0f, static_cast<float>(-8.0 / 7.0)}) {
    const float multiplier = clamped_round(ratio * factor, -127, 127), scale = multiplier * row_scale;
    const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
    Vec16 squares = broadcast(0.0f);
    for (int v = 0; v < vectors; ++v) {
      const Vec16 values = broadcast(row_scale) * (broadcast(multiplier) * codes_of(weights[v], inverse));
      squares = squares + (weights[v] - values) * (weights[v] - values);
    }
    const float loss = sum_of(squares);
    if (!(loss < least)) continue;
    best = multiplier;
    best_inverse = inverse;
    least = loss;
  }
  float whole[kMaxGroup];
  for (int v = 0; v < vectors; ++v) store(whole + v * kLanes, codes_of(weights[v], best_inverse));
  for (int i = 0; i < count; ++i) codes[i] = static_cast<std::uint8_t>(static_cast<int>(whole[i]) + 8);
  return {0, 0, static_cast<std::int8_t>(best)};
}

GroupHeader quantize_group(const WeightFormat& format, const float* w, int count, float row_scale, std::uint8_t* codes) {
  if (format.two_level) return quantize_two_level(w, count, format.group, row_scale, codes);
  if (format.kind == Kind::mxfp4) return quantize_mxfp4(w, count, codes);
  if (format.has_min) return quantize_affine(w, count, format.kind == Kind::int8 ? 255 : 15, codes);
  return quantize_symmetric(w, count, format.code_offset(), codes);
}

float row_scale(const float* w, std::int64_t k) {
  const float scale = largest_magnitude(w, k) / (7 * 127.0f);
  return scale < 0x1p-100f ? 0.0f : scale;
}

}  // namespace
}  // namespace tidegate

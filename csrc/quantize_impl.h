// One group of weights to codes, in loops that a compiler turns into vector code. Included once an instruction set;
// kIsa keeps the copies apart. Every operation is one IEEE single operation, as in the numpy twin.
#pragma once
#include <bit>
#include <cstdint>

#include "half.h"
#include "quantize.h"

namespace tidegate {

// Clamps, then rounds to nearest even through the number whose unit in the last place is 1.
template <int kIsa>
inline float clamped_round(float x, float low, float high) {
  x = x < low ? low : x > high ? high : x;
  return (x + 12582912.0f) - 12582912.0f;
}

template <int kIsa>
inline float reciprocal(std::uint16_t scale) {
  const float wide = half_to_float(scale);
  return wide == 0 ? 0.0f : 1.0f / wide;
}

template <int kIsa>
float largest_magnitude(const float* w, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(w[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// The first weight of largest magnitude in steps of -8.
template <int kIsa>
float scale_to_eight(const float* w, float largest) {
  int first = 0;
  while (__builtin_fabsf(w[first]) != largest) ++first;
  return w[first] / -8.0f;
}

template <int kIsa>
GroupHeader quantize_symmetric(const float* w, int count, int offset, std::uint8_t* codes) {
  const float largest = largest_magnitude<kIsa>(w, count);
  const float scale = offset == 8 ? scale_to_eight<kIsa>(w, largest) : largest / 127.0f;
  const GroupHeader header{float_to_half(scale), 0, 0};
  const float inverse = reciprocal<kIsa>(header.scale), bound = static_cast<float>(offset);
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(clamped_round<kIsa>(w[i] * inverse, -bound, bound - 1)) + offset);
  return header;
}

template <int kIsa>
GroupHeader quantize_affine(const float* w, int count, int levels, std::uint8_t* codes) {
  float low = w[0], high = w[0];
  for (int i = 1; i < count; ++i) {
    low = w[i] < low ? w[i] : low;
    high = w[i] > high ? w[i] : high;
  }
  const float top = static_cast<float>(levels);
  const GroupHeader header{float_to_half((high - low) / top), float_to_half(low), 0};
  const float inverse = reciprocal<kIsa>(header.scale), base = half_to_float(header.min);
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(clamped_round<kIsa>((w[i] - base) * inverse, 0, top)));
  return header;
}

// OCP MX: a power of two as scale, the nearest of eight magnitudes, ties to the even nibble.
template <int kIsa>
GroupHeader quantize_mxfp4(const float* w, int count, std::uint8_t* codes) {
  const float largest = largest_magnitude<kIsa>(w, count);
  int exponent = 0;
  __builtin_frexpf(largest, &exponent);
  exponent = exponent - 4 < -24 ? -24 : exponent - 4 > 15 ? 15 : exponent - 4;
  const GroupHeader header{largest > 0 ? float_to_half(std::bit_cast<float>((exponent + 127) << 23)) : std::uint16_t{0}, 0, 0};
  const float inverse = reciprocal<kIsa>(header.scale);
  for (int i = 0; i < count; ++i) {
    const float x = __builtin_fabsf(w[i]) * inverse;
    const int nibble = (x > 0.5f) + (x >= 1.5f) + (x > 2.5f) + (x >= 3.5f) + (x > 5.0f) + (x >= 7.0f) + (x > 10.0f);
    codes[i] = static_cast<std::uint8_t>(nibble | (w[i] < 0 && nibble > 0 ? 8 : 0));
  }
  return header;
}

// The sum of squares of what codes in steps of multiplier * row_scale leave of w[0..group), in 16 lanes.
template <int kIsa>
float loss_of(const float* w, int group, float multiplier, float row_scale, float inverse) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  for (int i = 0; i < group; i += kLanes)
    for (int j = 0; j < kLanes; ++j) {
      const float code = clamped_round<kIsa>(w[i + j] * inverse, -8, 7);
      const float error = w[i + j] - row_scale * (multiplier * code);
      lanes[j] += error * error;
    }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

// The least error among a few multipliers: clipping a group's largest weight often pays.
template <int kIsa>
GroupHeader quantize_two_level(const float* w, int count, int group, float row_scale, std::uint8_t* codes) {
  float padded[kMaxGroup];
  for (int i = 0; i < group; ++i) padded[i] = i < count ? w[i] : 0.0f;
  const float largest = largest_magnitude<kIsa>(padded, group);
  const float row_inverse = row_scale == 0 ? 0.0f : 1.0f / row_scale;
  const float ratio = scale_to_eight<kIsa>(padded, largest) * row_inverse;
  float best = 0, best_inverse = 0, least = __builtin_inff();
  for (const float shrink : {1.0f, 0.95f, 0.9f, 0.85f}) {
    const float multiplier = clamped_round<kIsa>(ratio * shrink, -127, 127), scale = multiplier * row_scale;
    const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
    const float loss = loss_of<kIsa>(padded, group, multiplier, row_scale, inverse);
    if (!(loss < least)) continue;
    best = multiplier;
    best_inverse = inverse;
    least = loss;
  }
  for (int i = 0; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(static_cast<int>(clamped_round<kIsa>(w[i] * best_inverse, -8, 7)) + 8);
  return {0, 0, static_cast<std::int8_t>(best)};
}

template <int kIsa>
GroupHeader quantize_group(const WeightFormat& format, const float* w, int count, float row_scale, std::uint8_t* codes) {
  if (format.two_level) return quantize_two_level<kIsa>(w, count, format.group, row_scale, codes);
  if (format.kind == Kind::mxfp4) return quantize_mxfp4<kIsa>(w, count, codes);
  if (format.has_min) return quantize_affine<kIsa>(w, count, format.kind == Kind::int8 ? 255 : 15, codes);
  return quantize_symmetric<kIsa>(w, count, format.code_offset(), codes);
}

}  // namespace tidegate

// Kernels over rows of numbers: norms, rotation, dot products. Included by float_{avx512,avx2,portable}.cc only.
#pragma once
#include "float_kernels.h"
#include "simd.h"

namespace tidegate {
namespace {

// Sum of f(i, lanes) over the row in four interleaved vectors: enough to keep the adders busy, and one fixed order.
template <class F>
TIDEGATE_INLINE float sum_row(std::int64_t n, F f) {
  Vec16 acc[4];
  for (Vec16& a : acc) a = broadcast(0.0f);
  std::int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) acc[j] = f(acc[j], i + j * kLanes, kLanes);
  for (int j = 0; i < n; i += kLanes, ++j) acc[j] = f(acc[j], i, n - i < kLanes ? static_cast<int>(n - i) : kLanes);
  return sum_of((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

// Calls f(i, lanes) for every vector of a row.
template <class F>
TIDEGATE_INLINE void for_row(std::int64_t n, F f) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, static_cast<int>(n - i));
}

void rms_norm(const float* x, const float* weight, float eps, float* y, std::int64_t n) {
  const float squares = sum_row(n, [&](Vec16 acc, std::int64_t i, int lanes) {
    const Vec16 v = load_up_to(x + i, lanes);
    return fma(v, v, acc);
  });
  const Vec16 inverse = broadcast(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  for_row(n, [&](std::int64_t i, int lanes) {
    store_up_to(y + i, load_up_to(weight + i, lanes) * (load_up_to(x + i, lanes) * inverse), lanes);
  });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y, std::int64_t n) {
  const float total = sum_row(n, [&](Vec16 acc, std::int64_t i, int lanes) { return acc + load_up_to(x + i, lanes); });
  const Vec16 mean = broadcast(total / static_cast<float>(n)), zero = broadcast(0.0f);
  const float squares = sum_row(n, [&](Vec16 acc, std::int64_t i, int lanes) {
    const Vec16 v = keep_lanes(load_up_to(x + i, lanes) - mean, 0, lanes, zero);
    return fma(v, v, acc);
  });
  const Vec16 inverse = broadcast(1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps));
  for_row(n, [&](std::int64_t i, int lanes) {
    const Vec16 v = (load_up_to(x + i, lanes) - mean) * inverse;
    store_up_to(y + i, fma(v, load_up_to(weight + i, lanes), load_up_to(bias + i, lanes)), lanes);
  });
}

// Products and differences are rounded one by one, as everybody's rotary code does.
void rotate(float* x, const float* cos, const float* sin, int dims, bool interleaved) {
  const int half = dims / 2;
  if (interleaved) {
    for (int i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for_row(half, [&](std::int64_t i, int lanes) {
    const Vec16 a = load_up_to(x + i, lanes), b = load_up_to(x + half + i, lanes);
    const Vec16 c = load_up_to(cos + i, lanes), s = load_up_to(sin + i, lanes);
    store_up_to(x + i, a * c - b * s, lanes);
    store_up_to(x + half + i, b * c + a * s, lanes);
  });
}

void to_half(const float* x, Half* y, std::int64_t n) {
  for_row(n, [&](std::int64_t i, int lanes) {
    if (lanes == kLanes) {
      store_clamped(y + i, load(x + i));
    } else {
      Half all[kLanes];
      store_clamped(all, load_first(x + i, lanes));
      __builtin_memcpy(y + i, all, static_cast<unsigned long>(lanes) * sizeof(Half));
    }
  });
}

template <int X, int W>
TIDEGATE_INLINE void dot_tile(const float* x, const float* w, std::int64_t n, float* out, std::int64_t out_stride) {
  Vec16 acc[X][W];
  for (int t = 0; t < X; ++t)
    for (int c = 0; c < W; ++c) acc[t][c] = broadcast(0.0f);
  for_row(n, [&](std::int64_t i, int lanes) {
    Vec16 weights[W];
    for (int c = 0; c < W; ++c) weights[c] = load_up_to(w + c * n + i, lanes);
    for (int t = 0; t < X; ++t) {
      const Vec16 v = load_up_to(x + t * n + i, lanes);
      for (int c = 0; c < W; ++c) acc[t][c] = fma(v, weights[c], acc[t][c]);
    }
  });
  for (int t = 0; t < X; ++t)
    for (int c = 0; c < W; ++c) out[t * out_stride + c] = sum_of(acc[t][c]);
}

template <int X>
TIDEGATE_INLINE void dot_rows(const float* x, const float* w, std::int64_t num_w, std::int64_t n, float* out,
                              std::int64_t out_stride) {
  constexpr int kTile = X == 1 ? 8 : 4;
  std::int64_t c = 0;
  for (; c + kTile <= num_w; c += kTile) dot_tile<X, kTile>(x, w + c * n, n, out + c, out_stride);
  for (; c < num_w; ++c) dot_tile<X, 1>(x, w + c * n, n, out + c, out_stride);
}

// One accumulator of 16 lanes a result, then across the lanes: the order does not depend on the tile.
void dots(const float* x, std::int64_t num_x, const float* w, std::int64_t num_w, std::int64_t n, float* out,
          std::int64_t out_stride) {
  constexpr int kTile = sizeof(Vec16) == 64 ? 4 : 2;
  std::int64_t t = 0;
  for (; t + kTile <= num_x; t += kTile) dot_rows<kTile>(x + t * n, w, num_w, n, out + t * out_stride, out_stride);
  for (; t < num_x; ++t) dot_rows<1>(x + t * n, w, num_w, n, out + t * out_stride, out_stride);
}

}  // namespace
}  // namespace tidegate

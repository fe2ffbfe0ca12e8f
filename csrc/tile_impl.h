// The matrix product of one panel (16 rows of packed weights) and one tile of tokens, for a SIMD type S.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace tidegate {


static inline void prefetch_lines(const std::uint8_t*& at, int lines) {
  for (int i = 0; i < lines; ++i, at += 64) __builtin_prefetch(at);
}

// int8, int4, mxfp4. A group is walked in chunks of kChunk inputs: 16 for groups of 16, otherwise 32.
template <class S, Kind kKind, bool kMin, int kChunk, int kTokens>
void integer_tile(const TileJob& job) {
  using F = typename S::F;
  constexpr int kStepInputs = kKind == Kind::int8 ? 4 : 8;
  const std::uint8_t* w = job.weights;
  const std::uint8_t* next = job.prefetch;
  const std::int8_t* x = job.tile.codes;
  const float* x_scales = job.tile.scales;
  const std::int32_t* x_sums = job.tile.sums;
  const int chunks = job.group / kChunk;
  const std::int64_t groups = job.k / job.group;
  F acc[kTokens];
  for (int m = 0; m < kTokens; ++m) acc[m] = S::zero();
  for (std::int64_t g = 0; g < groups; ++g) {
    prefetch_lines(next, job.prefetch_lines);
    const F scale = S::load_half(w);
    const F low = kMin ? S::load_half(w + 32) : scale;
    w += kMin ? 64 : 32;
    typename S::template Dot<kKind, kMin> dot[kTokens];
    for (int m = 0; m < kTokens; ++m) dot[m].start(x_sums[m]);
    int chunk = 0;
    do {
#pragma GCC unroll 8
      for (int step = 0; step < kChunk / kStepInputs; ++step) {
        if constexpr (kKind == Kind::int8) {
          const auto codes = S::template load_codes<kKind, kMin>(w);
          for (int m = 0; m < kTokens; ++m) dot[m].add(codes, x + 4 * m);
          x += 4 * kTokens;
        } else {
          typename S::Codes first, second;
          S::template load_nibbles<kKind>(w, first, second);
          for (int m = 0; m < kTokens; ++m) dot[m].add(first, x + 4 * m);
          for (int m = 0; m < kTokens; ++m) dot[m].add(second, x + 4 * (kTokens + m));
          x += 8 * kTokens;
        }
        w += 64;
      }
      for (int m = 0; m < kTokens; ++m) dot[m].end_chunk();
    } while (++chunk < chunks);
    for (int m = 0; m < kTokens; ++m) {
      const F x_scale = S::set(x_scales[m]);
      acc[m] = S::fma(S::from_int(dot[m].total()), S::mul(scale, x_scale), acc[m]);
      if (kMin) acc[m] = S::fma(S::mul(low, x_scale), S::from_int(S::set_int(x_sums[m])), acc[m]);
    }
    x_scales += kTokens;
    x_sums += kTokens;
  }
  for (int m = 0; m < kTokens; ++m) {
    float* const out = job.out + m * job.out_stride;
    if (job.rows == kPanelRows)
      S::store(out, acc[m]);
    else
      S::store_first(out, acc[m], job.rows);
  }
}

// f32 and bf16: one sum of even and one of odd inputs, so that a single token has two chains of dependent additions.
template <class S, Kind kKind, int kTokens>
void float_tile(const TileJob& job) {
  using F = typename S::F;
  const std::uint8_t* w = job.weights;
  const std::uint8_t* next = job.prefetch;
  const float* x = job.tile.values;
  F even[kTokens], odd[kTokens];
  for (int m = 0; m < kTokens; ++m) even[m] = odd[m] = S::zero();
  std::int64_t k = 0;
  for (; k + 2 <= job.k; k += 2, x += 2 * kTokens) {
    F w_even, w_odd;
    if constexpr (kKind == Kind::bf16) {
      const F pairs = S::load_bits(w);
      w_even = S::bf16_even(pairs);
      w_odd = S::bf16_odd(pairs);
      w += 64;
    } else {
      w_even = S::load_bits(w);
      w_odd = S::load_bits(w + 64);
      w += 128;
    }
    prefetch_lines(next, job.prefetch_lines);
    for (int m = 0; m < kTokens; ++m) even[m] = S::fma(w_even, S::set(x[m]), even[m]);
    for (int m = 0; m < kTokens; ++m) odd[m] = S::fma(w_odd, S::set(x[kTokens + m]), odd[m]);
  }
  if (k < job.k) {  // f32 with an odd number of inputs
    const F last = S::load_bits(w);
    for (int m = 0; m < kTokens; ++m) even[m] = S::fma(last, S::set(x[m]), even[m]);
  }
  for (int m = 0; m < kTokens; ++m) S::store_first(job.out + m * job.out_stride, S::add(even[m], odd[m]), job.rows);
}

// ---- choosing among them ----

template <class S, int kTokens>
Kernels::TileFn tile_fn_of(const WeightFormat& format) {
  constexpr Kind i8 = Kind::int8, i4 = Kind::int4;
  const bool small = format.group == 16;
  switch (format.kind) {
    case Kind::f32: return float_tile<S, Kind::f32, kTokens>;
    case Kind::bf16: return float_tile<S, Kind::bf16, kTokens>;
    case Kind::mxfp4: return integer_tile<S, Kind::mxfp4, false, 32, kTokens>;
    case Kind::int8:
      if (format.has_min) return small ? integer_tile<S, i8, true, 16, kTokens> : integer_tile<S, i8, true, 32, kTokens>;
      return small ? integer_tile<S, i8, false, 16, kTokens> : integer_tile<S, i8, false, 32, kTokens>;
    case Kind::int4: break;
  }
  if (format.has_min) return small ? integer_tile<S, i4, true, 16, kTokens> : integer_tile<S, i4, true, 32, kTokens>;
  return small ? integer_tile<S, i4, false, 16, kTokens> : integer_tile<S, i4, false, 32, kTokens>;
}

template <class S, int kTokens = 1>
Kernels::TileFn find_tile_fn(const WeightFormat& format, int tokens) {
  if (tokens == kTokens) return tile_fn_of<S, kTokens>(format);
  if constexpr (kTokens < S::kTileTokens) return find_tile_fn<S, kTokens + 1>(format, tokens);
  return nullptr;
}

}  // namespace tidegate

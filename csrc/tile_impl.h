// The matrix product of one panel (16 rows of packed weights) and one tile of tokens, for a SIMD type S.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace tidegate {

// What stands beside a group's codes.
enum class Scaling { scale, scale_and_min, multiplier };

// Loops over panels and tokens must be unrolled, or the arrays they index stay in memory. Without vector registers
// (kernels_portable.cc) they are there anyway.
#ifndef TIDEGATE_UNROLL
#define TIDEGATE_UNROLL _Pragma("GCC unroll 16")
#endif

template <int kPanels>
void prefetch(const std::uint8_t* (&next)[kPanels], int lines) {
  for (; lines > 0; --lines) {
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p, next[p - 1] += 64) __builtin_prefetch(next[p]);
  }
}

// int8, int4, mxfp4. A group is walked in chunks of kChunk inputs: 16 for groups of 16, otherwise 32.
template <class S, Kind kKind, Scaling kScaling, int kChunk, int kTokens, int kPanels>
void integer_tile(const TileJob& job) {
  constexpr bool kMin = kScaling == Scaling::scale_and_min, kTwoLevel = kScaling == Scaling::multiplier;
  using F = typename S::F;
  using Codes = typename S::Codes;
  constexpr int kStepInputs = kKind == Kind::int8 ? 4 : 8;
  const std::uint8_t* w[kPanels];
  const std::uint8_t* next[kPanels];
  F acc[kPanels][kTokens];
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
    w[p] = job.panels[p].weights;
    next[p] = job.panels[p].prefetch;
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) acc[p][m] = S::zero();
  }
  const std::int8_t* x = job.tile.codes;
  const float* x_scales = job.tile.scales;
  const std::int32_t* x_sums = job.tile.sums;
  const int chunks = job.group / kChunk;
  const std::uint8_t* header[kPanels];  // of two levels: where the next group's multipliers are
  for (std::int64_t g = 0, groups = job.k / job.group; g < groups; ++g) {
    typename S::template Dot<kKind, kMin> dot[kPanels][kTokens];
    prefetch(next, job.prefetch_lines);
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
      TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) dot[p][m].start(x_sums[m]);
    if (kTwoLevel && g % kMultiplierGroups == 0) {
      prefetch(next, 1);
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
        header[p] = w[p];
        w[p] += kMultiplierBytes;
      }
    }
    TIDEGATE_UNROLL for (int p = 0; p < kPanels && !kTwoLevel; ++p) {
      header[p] = w[p];
      w[p] += kMin ? 64 : 32;
    }
    int chunk = 0;
    do {
      TIDEGATE_UNROLL for (int step = 0; step < kChunk / kStepInputs; ++step) {
        Codes first[kPanels], second[kPanels];
        TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
          if constexpr (kKind == Kind::int8)
            first[p] = S::template load_codes<kKind, kMin>(w[p]);
          else
            S::template load_nibbles<kKind>(w[p], first[p], second[p]);
          w[p] += 64;
        }
        TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, x += 4) {
          const auto inputs = S::load_inputs(x);
          TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) dot[p][m].add(first[p], inputs);
        }
        TIDEGATE_UNROLL for (int m = 0; m < kTokens && kKind != Kind::int8; ++m, x += 4) {
          const auto inputs = S::load_inputs(x);
          TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) dot[p][m].add(second[p], inputs);
        }
      }
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
        TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) dot[p][m].end_chunk();
    } while (++chunk < chunks);
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
      if constexpr (kTwoLevel) {
        const F multiplier = S::load_int8(header[p]);
        header[p] += kPanelRows;
        TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m)
          acc[p][m] = S::fma(S::mul(S::from_int(dot[p][m].total()), multiplier), S::set(x_scales[m]), acc[p][m]);
        continue;
      }
      const F scale = S::load_half(header[p]);
      const F low = kMin ? S::load_half(header[p] + 32) : scale;
      TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) {
        const F x_scale = S::set(x_scales[m]);
        acc[p][m] = S::fma(S::from_int(dot[p][m].total()), S::mul(scale, x_scale), acc[p][m]);
        if (kMin) acc[p][m] = S::fma(S::mul(low, x_scale), S::from_int(S::set_int(x_sums[m])), acc[p][m]);
      }
    }
    x_scales += kTokens;
    x_sums += kTokens;
  }
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) {
      if (kTwoLevel) acc[p][m] = S::mul(S::load_bits(w[p]), acc[p][m]);
      S::store_first(job.panels[p].out + m * job.out_stride, acc[p][m], job.panels[p].rows);
    }
}

// f32 and bf16: one sum of even and one of odd inputs, so that a single token has two chains of dependent additions.
template <class S, Kind kKind, int kTokens, int kPanels>
void float_tile(const TileJob& job) {
  using F = typename S::F;
  const std::uint8_t* w[kPanels];
  const std::uint8_t* next[kPanels];
  F even[kPanels][kTokens], odd[kPanels][kTokens];
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
    w[p] = job.panels[p].weights;
    next[p] = job.panels[p].prefetch;
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) even[p][m] = odd[p][m] = S::zero();
  }
  const float* x = job.tile.values;
  for (std::int64_t pairs = job.k / 2; pairs > 0; --pairs) {
    F w_even[kPanels], w_odd[kPanels];
    prefetch(next, job.prefetch_lines);
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
      if constexpr (kKind == Kind::bf16) {
        const F both = S::load_bits(w[p]);
        w_even[p] = S::bf16_even(both);
        w_odd[p] = S::bf16_odd(both);
        w[p] += 64;
      } else {
        w_even[p] = S::load_bits(w[p]);
        w_odd[p] = S::load_bits(w[p] + 64);
        w[p] += 128;
      }
    }
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, ++x)
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) even[p][m] = S::fma(w_even[p], S::set(*x), even[p][m]);
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, ++x)
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) odd[p][m] = S::fma(w_odd[p], S::set(*x), odd[p][m]);
  }
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) {
      if (job.k % 2 != 0) even[p][m] = S::fma(S::load_bits(w[p]), S::set(x[m]), even[p][m]);  // f32 only
      S::store_first(job.panels[p].out + m * job.out_stride, S::add(even[p][m], odd[p][m]), job.panels[p].rows);
    }
}

// ---- choosing among them ----

template <class S>
TileShape tile_shape(const WeightFormat&) {
  return {S::kTileTokens, S::kTileTokens};
}

template <class S, int kTokens, int kPanels>
Kernels::TileFn tile_fn_of(const WeightFormat& format) {
  constexpr int T = kTokens, P = kPanels;
  constexpr Kind i8 = Kind::int8, i4 = Kind::int4;
  constexpr Scaling kPlain = Scaling::scale, kMin = Scaling::scale_and_min;
  const bool small = format.group == 16;
  switch (format.kind) {
    case Kind::f32: return float_tile<S, Kind::f32, T, P>;
    case Kind::bf16: return float_tile<S, Kind::bf16, T, P>;
    case Kind::mxfp4: return integer_tile<S, Kind::mxfp4, kPlain, 32, T, P>;
    case Kind::int8:
      if (format.has_min) return small ? integer_tile<S, i8, kMin, 16, T, P> : integer_tile<S, i8, kMin, 32, T, P>;
      return small ? integer_tile<S, i8, kPlain, 16, T, P> : integer_tile<S, i8, kPlain, 32, T, P>;
    case Kind::int4: break;
  }
  if (format.two_level) return integer_tile<S, i4, Scaling::multiplier, 32, T, P>;
  if (format.has_min) return small ? integer_tile<S, i4, kMin, 16, T, P> : integer_tile<S, i4, kMin, 32, T, P>;
  return small ? integer_tile<S, i4, kPlain, 16, T, P> : integer_tile<S, i4, kPlain, 32, T, P>;
}

template <class S, int kTokens = 1>
Kernels::TileFn find_tile_fn(const WeightFormat& format, int tokens, int panels) {
  if (tokens == kTokens)
    return panels == 1 ? tile_fn_of<S, kTokens, 1>(format) : tile_fn_of<S, kTokens, S::kTilePanels>(format);
  if constexpr (kTokens < S::kTileTokens) return find_tile_fn<S, kTokens + 1>(format, tokens, panels);
  return nullptr;
}

}  // namespace tidegate

// The matrix product of one panel (16 rows of packed weights) and one tile of tokens. Included by kernels_*.cc only.
#pragma once
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace tidegate {
namespace {

// What stands beside a group's codes.
enum class Scaling { scale, scale_and_min, multiplier };

// Loops over panels and tokens must be unrolled, or the arrays they index stay in memory. Without vector registers they are there
// anyway.
#if defined(__AVX2__)
#define TIDEGATE_UNROLL _Pragma("GCC unroll 16")
#else
#define TIDEGATE_UNROLL
#endif

template <int kPanels>
void prefetch(const std::uint8_t* (&next)[kPanels], int lines) {
  for (; lines > 0; --lines) {
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p, next[p - 1] += 64) __builtin_prefetch(next[p]);
  }
}

// A group's scales, and its minima if it has them; or its multipliers, whose scale comes at the end.
struct GroupScales {
  Vec16 scale, low;
};
template <Scaling kScaling>
TIDEGATE_INLINE GroupScales load_scales(const std::uint8_t* p) {
  if constexpr (kScaling == Scaling::multiplier) return {load(as<Int8>(p)), broadcast(0.0f)};
  return {load(as<Half>(p)), kScaling == Scaling::scale_and_min ? load(as<Half>(p + 32)) : broadcast(0.0f)};
}

// What every kernel makes of a group's sum of products, in these operations.
template <Scaling kScaling>
TIDEGATE_INLINE Vec16 add_group(Vec16 acc, Ints products, const GroupScales& group, float x_scale, std::int32_t x_sum) {
  const Vec16 scale = broadcast(x_scale), total = to_float(products);
  if constexpr (kScaling == Scaling::multiplier) return fma(total * group.scale, scale, acc);
  acc = fma(total, group.scale * scale, acc);
  if constexpr (kScaling == Scaling::scale_and_min) acc = fma(group.low * scale, to_float(broadcast_int(x_sum)), acc);
  return acc;
}

// int8, int4, mxfp4. A group is walked in chunks of kChunk inputs: 16 for groups of 16, otherwise 32.
template <Kind kKind, Scaling kScaling, int kChunk, int kTokens, int kPanels>
void integer_tile(const TileJob& job) {
  constexpr bool kMin = kScaling == Scaling::scale_and_min, kTwoLevel = kScaling == Scaling::multiplier;
  constexpr int kStepInputs = kKind == Kind::int8 ? 4 : 8;
  const std::uint8_t* w[kPanels];
  const std::uint8_t* header[kPanels];  // of two levels: where the next group's multipliers are
  const std::uint8_t* next[kPanels];
  Vec16 acc[kPanels][kTokens];
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
    w[p] = header[p] = job.panels[p].weights;
    next[p] = job.panels[p].prefetch;
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) acc[p][m] = broadcast(0.0f);
  }
  const std::int8_t* x = job.tile.codes;
  const float* x_scales = job.tile.scales;
  const std::int32_t* x_sums = job.tile.sums;
  const int chunks = job.group / kChunk;
  for (std::int64_t g = 0, groups = job.k / job.group; g < groups; ++g) {
    Dot<kKind, kMin> dot[kPanels][kTokens];
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
            first[p] = load_codes(w[p]);
          else
            load_nibbles<kKind>(w[p], first[p], second[p]);
          w[p] += 64;
        }
        TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, x += 4) {
          const auto inputs = load_inputs(x);
          TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) dot[p][m].add(first[p], inputs);
        }
        TIDEGATE_UNROLL for (int m = 0; m < kTokens && kKind != Kind::int8; ++m, x += 4) {
          const auto inputs = load_inputs(x);
          TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) dot[p][m].add(second[p], inputs);
        }
      }
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
        TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) dot[p][m].end_chunk();
    } while (++chunk < chunks);
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
      const GroupScales scales = load_scales<kScaling>(header[p]);
      if (kTwoLevel) header[p] += kPanelRows;
      TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m)
        acc[p][m] = add_group<kScaling>(acc[p][m], dot[p][m].total(), scales, x_scales[m], x_sums[m]);
    }
    x_scales += kTokens;
    x_sums += kTokens;
  }
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) {
      if (kTwoLevel) acc[p][m] = load(as<float>(w[p])) * acc[p][m];
      store_up_to(job.panels[p].out + m * job.out_stride, acc[p][m], job.panels[p].rows);
    }
}

// f32 and bf16: one sum of even and one of odd inputs, so that a single token has two chains of dependent additions.
template <Kind kKind, int kTokens, int kPanels>
void float_tile(const TileJob& job) {
  const std::uint8_t* w[kPanels];
  const std::uint8_t* next[kPanels];
  Vec16 even[kPanels][kTokens], odd[kPanels][kTokens];
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
    w[p] = job.panels[p].weights;
    next[p] = job.panels[p].prefetch;
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) even[p][m] = odd[p][m] = broadcast(0.0f);
  }
  const float* x = job.tile.values;
  for (std::int64_t pairs = job.k / 2; pairs > 0; --pairs) {
    Vec16 w_even[kPanels], w_odd[kPanels];
    prefetch(next, job.prefetch_lines);
    TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) {
      if constexpr (kKind == Kind::bf16) {
        const Vec16 both = load(as<float>(w[p]));
        w_even[p] = bf16_even(both);
        w_odd[p] = bf16_odd(both);
        w[p] += 64;
      } else {
        w_even[p] = load(as<float>(w[p]));
        w_odd[p] = load(as<float>(w[p] + 64));
        w[p] += 128;
      }
    }
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, ++x)
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) even[p][m] = fma(w_even[p], broadcast(*x), even[p][m]);
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m, ++x)
      TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p) odd[p][m] = fma(w_odd[p], broadcast(*x), odd[p][m]);
  }
  TIDEGATE_UNROLL for (int p = 0; p < kPanels; ++p)
    TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) {
      if (job.k % 2 != 0) even[p][m] = fma(load(as<float>(w[p])), broadcast(x[m]), even[p][m]);  // f32 only
      store_up_to(job.panels[p].out + m * job.out_stride, even[p][m] + odd[p][m], job.panels[p].rows);
    }
}

// ---- choosing among them ----

TileShape tile_shape(const WeightFormat&) { return {kTileTokens, kTileTokens}; }

template <int kTokens, int kPanels>
Kernels::TileFn tile_fn_of(const WeightFormat& format) {
  constexpr int T = kTokens, P = kPanels;
  constexpr Kind i8 = Kind::int8, i4 = Kind::int4;
  constexpr Scaling kPlain = Scaling::scale, kMin = Scaling::scale_and_min;
  const bool small = format.group == 16;
  switch (format.kind) {
    case Kind::f32: return float_tile<Kind::f32, T, P>;
    case Kind::bf16: return float_tile<Kind::bf16, T, P>;
    case Kind::mxfp4: return integer_tile<Kind::mxfp4, kPlain, 32, T, P>;
    case Kind::int8:
      if (format.has_min) return small ? integer_tile<i8, kMin, 16, T, P> : integer_tile<i8, kMin, 32, T, P>;
      return small ? integer_tile<i8, kPlain, 16, T, P> : integer_tile<i8, kPlain, 32, T, P>;
    case Kind::int4: break;
  }
  if (format.two_level) return integer_tile<i4, Scaling::multiplier, 32, T, P>;
  if (format.has_min) return small ? integer_tile<i4, kMin, 16, T, P> : integer_tile<i4, kMin, 32, T, P>;
  return small ? integer_tile<i4, kPlain, 16, T, P> : integer_tile<i4, kPlain, 32, T, P>;
}

template <int kTokens = 1>
Kernels::TileFn find_tile_fn(const WeightFormat& format, int tokens, int panels) {
  if (tokens == kTokens)
    return panels == 1 ? tile_fn_of<kTokens, 1>(format) : tile_fn_of<kTokens, kTilePanels>(format);
  if constexpr (kTokens < kTileTokens) return find_tile_fn<kTokens + 1>(format, tokens, panels);
  return nullptr;
}

}  // namespace
}  // namespace tidegate

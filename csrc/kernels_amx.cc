#if defined(__x86_64__)
#include <algorithm>

#include "activation_impl.h"
#include "prepare_impl.h"
#include "tile_impl.h"
#if defined(TIDEGATE_MATRIX_UNIT)
#include "matrix_unit.h"
#endif

namespace tidegate {

extern const Kernels kernels_avx512;

namespace {

#if defined(TIDEGATE_MATRIX_UNIT)

// Up to this many tokens vector instructions are as fast: a product in the matrix unit takes the same time for one and for 16.
constexpr int kVectorTokens = 4;

template <Kind kKind>
void unpack(const std::uint8_t* packed, int count, std::uint8_t* codes) {
  for (int i = 0; i < count; i += 8, packed += 64, codes += 128) {
    Codes low, high;
    load_nibbles<kKind>(packed, low, high);
    _mm512_store_si512(codes, low);
    _mm512_store_si512(codes + 64, high);
  }
}

// One panel against a tile of kTokens tokens, or of job.tile.tokens if kTokens is 0: integer_tile's sums, bit for bit.
template <Kind kKind, Scaling kScaling, int kTokens>
void matrix_panel(const TileJob& job, const TileJob::Panel& panel) {
  constexpr bool kMin = kScaling == Scaling::scale_and_min, kTwoLevel = kScaling == Scaling::multiplier;
  constexpr int kMost = MatrixUnit::kTokens;
  const int tokens = kTokens > 0 ? kTokens : job.tile.tokens, count = std::min(job.group, MatrixUnit::kInputs);
  alignas(64) std::uint8_t codes[MatrixUnit::kInputs * kPanelRows];
  alignas(64) std::int32_t sums[kMost * kPanelRows];
  Vec16 acc[kMost];
  TIDEGATE_UNROLL for (int m = 0; m < kMost; ++m) acc[m] = broadcast(0.0f);
  const std::uint8_t *w = panel.weights, *next = panel.prefetch;
  const std::int8_t* x = job.tile.codes;
  const float* x_scales = job.tile.scales;
  const std::int32_t* x_sums = job.tile.sums;
  const std::uint8_t* multipliers = nullptr;
  for (std::int64_t g = 0, groups = job.k / job.group; g < groups; ++g, x_scales += tokens, x_sums += tokens) {
    const bool starts_block = kTwoLevel && g % kMultiplierGroups == 0;
    for (int lines = job.prefetch_lines + starts_block; lines > 0; --lines, next += 64) __builtin_prefetch(next);
    if (starts_block) {
      multipliers = w;
      w += kMultiplierBytes;
    }
    const GroupScales scales = load_scales<kScaling>(kTwoLevel ? multipliers : w);
    if (kTwoLevel)
      multipliers += kPanelRows;
    else
      w += kMin ? 64 : 32;
    MatrixUnit::clear_sums();
    for (int done = 0; done < job.group; done += count, x += count) {
      MatrixUnit::load_inputs(x, job.tile.row_bytes);
      if constexpr (kKind == Kind::int8) {
        MatrixUnit::load_weights(w);
        w += kPanelRows * count;
      } else {
        unpack<kKind>(w, count, codes);
        MatrixUnit::load_weights(codes);
        w += kPanelRows * count / 2;
      }
      MatrixUnit::multiply();
    }
    MatrixUnit::store_sums(sums);
    const auto scale_token = [&](int m) {
      const __m512i products = _mm512_load_si512(sums + m * kPanelRows);
      const Ints total{kMin ? products : _mm512_add_epi32(products, _mm512_set1_epi32(x_sums[m]))};
      acc[m] = add_group<kScaling>(acc[m], total, scales, x_scales[m], x_sums[m]);
    };
    if constexpr (kTokens > 0)
      TIDEGATE_UNROLL for (int m = 0; m < kTokens; ++m) scale_token(m);
    else
      for (int m = 0; m < tokens; ++m) scale_token(m);
  }
  for (int m = 0; m < tokens; ++m) {
    if (kTwoLevel) acc[m] = load(as<float>(w)) * acc[m];
    store_up_to(panel.out + m * job.out_stride, acc[m], panel.rows);
  }
}

template <Kind kKind, Scaling kScaling, int kPanels>
void matrix_tile(const TileJob& job) {
  MatrixUnit::configure(job.tile.tokens, std::min(job.group, MatrixUnit::kInputs));
  for (int p = 0; p < kPanels; ++p) {
    if (job.tile.tokens == MatrixUnit::kTokens)
      matrix_panel<kKind, kScaling, MatrixUnit::kTokens>(job, job.panels[p]);
    else
      matrix_panel<kKind, kScaling, 0>(job, job.panels[p]);
  }
  MatrixUnit::release();
}

template <int kPanels>
Kernels::TileFn matrix_tile_fn(const WeightFormat& format) {
  constexpr Scaling kPlain = Scaling::scale, kMin = Scaling::scale_and_min;
  if (format.kind == Kind::mxfp4) return matrix_tile<Kind::mxfp4, kPlain, kPanels>;
  if (format.kind == Kind::int8)
    return format.has_min ? matrix_tile<Kind::int8, kMin, kPanels> : matrix_tile<Kind::int8, kPlain, kPanels>;
  if (format.two_level) return matrix_tile<Kind::int4, Scaling::multiplier, kPanels>;
  return format.has_min ? matrix_tile<Kind::int4, kMin, kPanels> : matrix_tile<Kind::int4, kPlain, kPanels>;
}

TileShape amx_shape(const WeightFormat& format) {
  return format.is_integer() ? TileShape{MatrixUnit::kTokens, kVectorTokens} : tile_shape(format);
}

Kernels::TileFn amx_tile_fn(const WeightFormat& format, int tokens, int panels) {
  if (tokens <= kVectorTokens) return kernels_avx512.tile_fn(format, tokens, panels);
  return panels == 1 ? matrix_tile_fn<1>(format) : matrix_tile_fn<2>(format);
}
static_assert(kVectorTokens <= kTileTokens && MatrixUnit::kTokens <= kMaxTileTokens);

#else  // a compiler that does not know the instructions: available_isas() does not offer them

TileShape amx_shape(const WeightFormat& format) { return tile_shape(format); }
Kernels::TileFn amx_tile_fn(const WeightFormat& format, int tokens, int panels) {
  return kernels_avx512.tile_fn(format, tokens, panels);
}

#endif

}  // namespace

extern const Kernels kernels_amx = {amx_shape, kTilePanels, amx_tile_fn, prepare, activate, weighted_sum};

}  // namespace tidegate
#endif

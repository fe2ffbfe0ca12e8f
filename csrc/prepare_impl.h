// Inputs made ready for a weight format: int8 codes with a scale a group, or a plain transposition. Included by kernels_*.cc only.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace tidegate {
namespace {

// One group: scale = max|x| / 127, code = round-half-even(x / scale), both as IEEE single operations.
void quantize_group(const float* x, int group, float* scale, std::int32_t* sum, std::int8_t* codes) {
  Vec16 largest = broadcast(0.0f);
  for (int i = 0; i < group; i += kLanes) largest = max(abs(load(x + i)), largest);
  *scale = max_of(largest) / 127.0f;
  *sum = 0;
  if (!(*scale > 0)) {
    std::memset(codes, 0, static_cast<std::size_t>(group));
    return;
  }
  const Vec16 divisor = broadcast(*scale), low = broadcast(-127.0f), high = broadcast(127.0f);
  for (int i = 0; i < group; i += kLanes) {
    // A scale that is a subnormal number is coarse enough to push a code past 127.
    const Ints whole = to_int(min(max(load(x + i) / divisor, low), high));
    *sum += sum_of(whole);
    store_bytes(codes + i, whole);
  }
}

void prepare_integer(const WeightFormat& format, const float* x, std::int64_t first, std::int64_t count, const Tile& tile,
                     int m) {
  const int group = format.group, factor = sum_factor(format.kind, format.has_min);
  float padded[kMaxGroup];
  std::int8_t codes[kMaxGroup];
  for (std::int64_t done = 0; done < count; done += group) {
    const float* source = x + done;
    if (count - done < group) {
      std::memset(padded, 0, sizeof padded);
      std::memcpy(padded, source, static_cast<std::size_t>(count - done) * sizeof(float));
      source = padded;
    }
    const std::int64_t at = (first + done) / group * tile.tokens + m;
    std::int8_t* const target = tile.codes_at(first + done, m);
    std::int32_t sum;
    quantize_group(source, group, tile.scales + at, &sum, tile.has_rows() ? target : codes);
    tile.sums[at] = factor * sum;
    if (tile.has_rows()) continue;
    for (int i = 0; i < group; i += 4) std::memcpy(target + i * tile.tokens, codes + i, 4);
  }
}

void prepare_float(const WeightFormat& format, const float* x, std::int64_t first, std::int64_t count, const Tile& tile,
                   int m) {
  float* const target = tile.values + first * tile.tokens + m;
  for (std::int64_t i = 0; i < count; ++i) target[i * tile.tokens] = x[i];
  for (std::int64_t i = count; i < format.padded_k(count); ++i) target[i * tile.tokens] = 0;
}

void prepare(const WeightFormat& format, const float* x, std::int64_t first, std::int64_t count, const Tile& tile, int m) {
  if (format.is_integer())
    prepare_integer(format, x, first, count, tile, m);
  else
    prepare_float(format, x, first, count, tile, m);
}

}  // namespace
}  // namespace tidegate

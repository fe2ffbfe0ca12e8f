// Gated activations and the weighted sum of expert outputs. Every element goes through the same operations wherever it stands, so
// neither the length of a call nor the instruction set changes a bit. Included by kernels_*.cc only.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace tidegate {
namespace {

// e^x within 2 units in the last place: 2^n * p(r), x = n ln 2 + r. Saturates instead of overflowing.
Vec16 saturated_exp(Vec16 x) {
  const Vec16 whole = broadcast(kWhole);
  x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  const Vec16 biased = x * broadcast(1.44269504f) + whole;
  const Vec16 n = biased - whole;
  Vec16 r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec16 p = broadcast(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  return p * exp2_of(biased);
}

// x * sigmoid(slope * x)
Vec16 swish(Vec16 x, Vec16 slope) {
  return x / (broadcast(1.0f) + saturated_exp((broadcast(0.0f) - slope) * x));
}

Vec16 activated(const ActivationParams& params, Vec16 gate, Vec16 up) {
  switch (params.kind) {
    case Activation::silu: return swish(gate, broadcast(1.0f)) * up;
    case Activation::gelu_tanh: {
      // 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
      const Vec16 slope = broadcast(1.5957691216f) * fma(gate * gate, broadcast(0.044715f), broadcast(1.0f));
      return swish(gate, slope) * up;
    }
    case Activation::clamped_swiglu: {
      const Vec16 limit = broadcast(params.limit);
      gate = min(gate, limit);
      up = max(min(up, limit), broadcast(0.0f) - limit);
      return (up + broadcast(1.0f)) * swish(gate, broadcast(params.alpha));
    }
    case Activation::gelu: {
      // No model of ours has speed at stake here, so the exact error function of the C library will do.
      float values[16];
      store(values, gate);
      for (float& v : values) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
      return load(values) * up;
    }
  }
  return gate;
}

void activate(const ActivationParams& params, float* gate, const float* up, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(gate + i, activated(params, load(gate + i), load(up + i)));
  const int rest = static_cast<int>(count - i);
  if (rest > 0) store_first(gate + i, activated(params, load_first(gate + i, rest), load_first(up + i, rest)), rest);
}

void weighted_sum(float* out, const float* parts, std::int64_t stride, const float* weights, int num_parts,
                  std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Vec16 sum = broadcast(0.0f);
    for (int k = 0; k < num_parts; ++k) sum = fma(broadcast(weights[k]), load(parts + k * stride + i), sum);
    store(out + i, sum);
  }
  for (; i < count; ++i) {
    float sum = 0;
    for (int k = 0; k < num_parts; ++k) sum = __builtin_fmaf(weights[k], parts[k * stride + i], sum);
    out[i] = sum;
  }
}

}  // namespace
}  // namespace tidegate

// Gated activations and the weighted sum of expert outputs, for a SIMD type S. Every element goes through the same
// operations wherever it stands, so neither the length of a call nor the instruction set changes a bit.
#pragma once
#include <cmath>
#include <cstdint>

#include "kernels.h"

namespace tidegate {

// exp(x) within 2 units in the last place: 2^n * p(r), x = n ln 2 + r. Saturates instead of overflowing.
template <class S>
typename S::F exp_of(typename S::F x) {
  using F = typename S::F;
  x = S::min(S::max(x, S::set(-87.0f)), S::set(88.0f));
  const F n = S::round(S::mul(x, S::set(1.44269504f)));
  F r = S::fma(n, S::set(-0.693359375f), x);
  r = S::fma(n, S::set(2.12194440e-4f), r);
  F p = S::set(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = S::fma(p, r, S::set(c));
  return S::mul(p, S::pow2(n));
}

// x * sigmoid(slope * x)
template <class S>
typename S::F swish(typename S::F x, typename S::F slope) {
  using F = typename S::F;
  const F e = exp_of<S>(S::mul(S::sub(S::zero(), slope), x));
  return S::div(x, S::add(S::set(1), e));
}

template <class S>
typename S::F activated(const ActivationParams& params, typename S::F gate, typename S::F up) {
  using F = typename S::F;
  switch (params.kind) {
    case Activation::silu: return S::mul(swish<S>(gate, S::set(1)), up);
    case Activation::gelu_tanh: {
      // 0.5 (1 + tanh u) = sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
      const F slope = S::mul(S::set(1.5957691216f), S::fma(S::mul(gate, gate), S::set(0.044715f), S::set(1)));
      return S::mul(swish<S>(gate, slope), up);
    }
    case Activation::clamped_swiglu: {
      const F limit = S::set(params.limit);
      gate = S::min(gate, limit);
      up = S::max(S::min(up, limit), S::sub(S::zero(), limit));
      return S::mul(S::add(up, S::set(1)), swish<S>(gate, S::set(params.alpha)));
    }
    case Activation::gelu: {
      // No model of ours has speed at stake here, so the exact error function of the C library will do.
      float values[16];
      S::store(values, gate);
      for (float& v : values) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
      return S::mul(S::load(values), up);
    }
  }
  return gate;
}

template <class S>
void activate(const ActivationParams& params, float* gate, const float* up, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) S::store(gate + i, activated<S>(params, S::load(gate + i), S::load(up + i)));
  if (i == count) return;
  float last_gate[16] = {}, last_up[16] = {};
  for (std::int64_t j = i; j < count; ++j) {
    last_gate[j - i] = gate[j];
    last_up[j - i] = up[j];
  }
  const auto result = activated<S>(params, S::load(last_gate), S::load(last_up));
  S::store_first(gate + i, result, static_cast<int>(count - i));
}

template <class S>
void weighted_sum(float* out, const float* parts, std::int64_t stride, const float* weights, int num_parts,
                  std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    auto sum = S::zero();
    for (int k = 0; k < num_parts; ++k) sum = S::fma(S::set(weights[k]), S::load(parts + k * stride + i), sum);
    S::store(out + i, sum);
  }
  for (; i < count; ++i) {
    float sum = 0;
    for (int k = 0; k < num_parts; ++k) sum = __builtin_fmaf(weights[k], parts[k * stride + i], sum);
    out[i] = sum;
  }
}

}  // namespace tidegate

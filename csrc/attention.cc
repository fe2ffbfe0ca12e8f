#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tidegate {
namespace {

void require(bool good, const char* what) {
  if (!good) throw std::invalid_argument(std::string("attention: ") + what);
}

void clip(float* x, std::int64_t n, float limit) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = std::clamp(x[i], -limit, limit);
}

// What a thread needs for one token: its normed and rotated keys, one head, and what is stored of it.
struct TokenScratch {
  float* projection;
  float* head;
  std::uint8_t* stored;
};

class Writer {
 public:
  Writer(const FloatKernels& kernels, const KvPages& kv, const Step& step, const GroupedAttention& layer)
      : kernels_(kernels), kv_(kv), step_(step), a_(layer) {}

  // Queries of token t to q_rows (see Queries), its keys and values to its page.
  void write(std::int64_t t, const float* qkv, float* q_rows, const TokenScratch& scratch) const {
    const int group = a_.num_heads / a_.num_kv_heads, k_dim = a_.head_dim;
    const std::int64_t q_width = static_cast<std::int64_t>(a_.num_heads) * k_dim;
    const std::int64_t k_width = static_cast<std::int64_t>(a_.num_kv_heads) * k_dim;
    const float* q = normed_projection(qkv, a_.q_norm, scratch);
    for (int h = 0; h < a_.num_heads; ++h) {
      const int kv_head = h / group, j = h % group;
      float* const row = q_rows + ((kv_head * step_.num_tokens() + t) * group + j) * k_dim;
      prepare_head(t, q + h * k_dim, a_.q_norm, row);
      for (int d = 0; d < k_dim; ++d) row[d] *= a_.scale;
    }
    const float* k = normed_projection(qkv + q_width, a_.k_norm, scratch);
    const float* v = qkv + q_width + k_width;
    for (int h = 0; h < a_.num_kv_heads; ++h) {
      prepare_head(t, k + h * k_dim, a_.k_norm, scratch.head);
      write_keys(t, h, scratch);
      std::memcpy(scratch.head, v + h * a_.v_head_dim, static_cast<std::size_t>(a_.v_head_dim) * sizeof(float));
      if (a_.clip > 0.0f) clip(scratch.head, a_.v_head_dim, a_.clip);
      write_values(t, h, scratch);
    }
  }

 private:
  const float* normed_projection(const float* x, const NormWeights& norm, const TokenScratch& s) const {
    if (a_.qk_norm != GroupedAttention::QkNorm::full) return x;
    norm_row(kernels_, norm, x, s.projection);
    return s.projection;
  }

  void prepare_head(std::int64_t t, const float* x, const NormWeights& norm, float* y) const {
    if (a_.qk_norm == GroupedAttention::QkNorm::head)
      norm_row(kernels_, norm, x, y);
    else
      std::memcpy(y, x, static_cast<std::size_t>(a_.head_dim) * sizeof(float));
    if (a_.clip > 0.0f) clip(y, a_.head_dim, a_.clip);
    if (a_.rope != nullptr) kernels_.rotate(y, a_.rope->cos(t), a_.rope->sin(t), a_.rope->dims(), a_.rope->interleaved());
  }

  // Number d of a position is at d * kPageTokens.
  template <class T>
  static void scatter(const std::uint8_t* from, std::uint8_t* to, std::int64_t slot, int n) {
    for (int d = 0; d < n; ++d)
      reinterpret_cast<T*>(to)[static_cast<std::int64_t>(d) * kPageTokens + slot] = reinterpret_cast<const T*>(from)[d];
  }

  void write_keys(std::int64_t t, int head, const TokenScratch& s) const {
    const std::int64_t slot = step_.position(t) % kPageTokens;
    std::uint8_t* const keys = kv_.keys(step_.page_of(t), a_.layer, head);
    store_kv(kernels_, kv_, s.head, a_.head_dim, s.stored, keys, slot);
    switch (kv_.format()) {
      case KvFormat::f32: return scatter<float>(s.stored, keys, slot, a_.head_dim);
      case KvFormat::f16: return scatter<std::uint16_t>(s.stored, keys, slot, a_.head_dim);
      case KvFormat::int8: return scatter<std::int8_t>(s.stored, keys, slot, a_.head_dim);
    }
  }

  void write_values(std::int64_t t, int head, const TokenScratch& s) const {
    const std::int64_t slot = step_.position(t) % kPageTokens;
    std::uint8_t* const values = kv_.values(step_.page_of(t), a_.layer, head);
    std::uint8_t* const to = values + static_cast<std::size_t>(slot * a_.v_head_dim) * kv_.element_bytes();
    store_kv(kernels_, kv_, s.head, a_.v_head_dim, to, values, slot);
  }

  const FloatKernels& kernels_;
  const KvPages& kv_;
  const Step& step_;
  const GroupedAttention& a_;
};

void check_input(const KvPages& kv, const Step& step, const GroupedAttention& a, const Matrix& qkv) {
  require(kv.kv_heads() == a.num_kv_heads && kv.k_dim() == a.head_dim && kv.v_dim() == a.v_head_dim &&
              a.layer < kv.num_layers(), "the KV cache has another shape");
  require(qkv.rows == step.num_tokens(), "qkv has not one row a token");
  require(qkv.cols == static_cast<std::int64_t>(a.num_heads + a.num_kv_heads) * a.head_dim +
                          static_cast<std::int64_t>(a.num_kv_heads) * a.v_head_dim, "qkv has another width");
}

// Codes of -127 to 127, the nearest; returns their scale.
float to_int8(const float* x, std::int8_t* y, int n) {
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int i = 0; i < n; ++i) {
    const float code = std::nearbyint(x[i] * inverse);
    y[i] = static_cast<std::int8_t>(code >= -127.0f ? std::min(code, 127.0f) : -127.0f);
  }
  return largest / 127.0f;
}

}  // namespace

void store_kv(const FloatKernels& kernels, const KvPages& kv, const float* x, int dim, std::uint8_t* to, std::uint8_t* area,
              std::int64_t slot) {
  switch (kv.format()) {
    case KvFormat::f32: std::memcpy(to, x, static_cast<std::size_t>(dim) * sizeof(float)); return;
    case KvFormat::f16: kernels.to_half(x, reinterpret_cast<std::uint16_t*>(to), dim); return;
    case KvFormat::int8: {
      float* const scales = reinterpret_cast<float*>(area + static_cast<std::size_t>(dim) * kPageTokens);
      scales[slot] = to_int8(x, reinterpret_cast<std::int8_t*>(to), dim);
    }
  }
}

void check_layer(const GroupedAttention& a) {
  require(a.num_heads > 0 && a.num_kv_heads > 0 && a.num_heads % a.num_kv_heads == 0, "heads are not whole groups");
  require(a.head_dim > 0 && a.v_head_dim > 0 && a.layer >= 0 && a.window >= 0, "sizes must be positive");
  require(a.rope == nullptr || a.rope->dims() <= a.head_dim, "more dimensions rotate than a head has");
  if (a.qk_norm == GroupedAttention::QkNorm::none) return;
  const bool by_head = a.qk_norm == GroupedAttention::QkNorm::head;
  require(a.q_norm.width == static_cast<std::int64_t>(a.head_dim) * (by_head ? 1 : a.num_heads) &&
              a.k_norm.width == static_cast<std::int64_t>(a.head_dim) * (by_head ? 1 : a.num_kv_heads),
          "norms of q and k have another width");
}

Matrix attend(Compute& compute, const KvPages& kv, const Step& step, const GroupedAttention& layer, const Matrix& qkv) {
  check_input(kv, step, layer, qkv);
  if (layer.rope != nullptr) layer.rope->prepare(step);
  const std::int64_t tokens = step.num_tokens();
  const Matrix out = compute.workspace.matrix(tokens, static_cast<std::int64_t>(layer.num_heads) * layer.v_head_dim);
  const Scratch scratch(compute.workspace);
  const std::int64_t q_width = static_cast<std::int64_t>(layer.num_heads) * layer.head_dim;
  const std::int64_t head_width = std::max(layer.head_dim, layer.v_head_dim);
  float* const q_rows = compute.workspace.array<float>(tokens * q_width);
  const std::int64_t threads = compute.pool.threads();
  const Matrix projections = compute.workspace.matrix(threads, q_width), heads = compute.workspace.matrix(threads, 2 * head_width);
  const Writer writer(float_kernels(compute.isa), kv, step, layer);
  compute.pool.parallel_for(tokens, 4, [&](std::int64_t begin, std::int64_t end, int thread) {
    float* const head = heads.row(thread);
    const TokenScratch own{projections.row(thread), head, reinterpret_cast<std::uint8_t*>(head + head_width)};
    for (std::int64_t t = begin; t < end; ++t) writer.write(t, qkv.row(t), q_rows, own);
  });
  const int group = layer.num_heads / layer.num_kv_heads;
  attend_cached(compute, kv, step, {q_rows, 0, tokens, group, layer.head_dim, layer.v_head_dim, layer.v_head_dim, layer.layer, layer.window,
                                    layer.sinks}, out);
  return out;
}

}  // namespace tidegate

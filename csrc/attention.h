// Attention over paged keys and values. The order of a query's float operations depends on its position alone: neither on
// the chunk or batch it comes in nor on the threads (attention_kernels.h has the inner part of that promise).
#pragma once
#include <cstdint>

#include "compute.h"
#include "format.h"
#include "norm.h"
#include "step.h"

namespace tidegate {

// A layer's grouped-query attention. Pointers are borrowed.
struct GroupedAttention {
  enum class QkNorm { none, head, full };

  int layer = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, v_head_dim = 0;
  float scale = 1.0f;
  float clip = 0.0f;  // q, k and v are clipped to [-clip, clip]; 0: not
  int window = 0;     // a token sees itself and window - 1 before it; 0: all
  QkNorm qk_norm = QkNorm::none;
  NormWeights q_norm, k_norm;
  const float* sinks = nullptr;  // [num_heads]
  RopeTable* rope = nullptr;
};

// Throws std::invalid_argument if the parts do not fit together.
void check_layer(const GroupedAttention& layer);

// qkv [T, (H + KV) * head_dim + KV * v_head_dim] -> [T, H * v_head_dim]. Writes the step's keys and values first.
// Throws std::invalid_argument on a qkv or a cache of another shape.
Matrix attend(Compute& compute, const KvPages& kv, const Step& step, const GroupedAttention& layer, const Matrix& qkv);

// One head's keys or values of a position to `to`, as the cache keeps them; the scale of int8 to its place in `area`, the head's
// part of the page, of which the position is number `slot`.
void store_kv(const FloatKernels& kernels, const KvPages& kv, const float* x, int dim, std::uint8_t* to, std::uint8_t* area,
              std::int64_t slot);

// The part that grouped and latent attention share: scaled and rotated queries of some of the step's tokens against what is
// cached, the step's own keys included.
struct Queries {
  const float* rows;  // [kv_heads][num_tokens * group][k_dim]: row t * group + j is head j of the group of token t
  std::int64_t first_token, num_tokens;
  int group, k_dim, v_dim, v_stride;
  int layer, window;
  const float* sinks;  // [kv_heads * group] or null
};
// out [num_tokens, kv_heads * group * v_dim]
void attend_cached(Compute& compute, const KvPages& kv, const Step& step, const Queries& queries, const Matrix& out);

// A layer's multi-head latent attention in absorbed form (DeepSeek-V2): the cache holds one latent and one rotated key a
// token; k_up takes queries into the latent space, v_up takes the attended latents out of it.
struct LatentAttention {
  int layer = 0, num_heads = 0, kv_lora_rank = 0, nope_dim = 0, v_head_dim = 0;
  float scale = 1.0f;
  int window = 0;
  NormWeights kv_norm;
  const float* sinks = nullptr;
  RopeTable* rope = nullptr;
  PackedMatrix k_up, v_up;  // [H * kv_lora_rank, nope_dim], [H * v_head_dim, kv_lora_rank]
};

void check_layer(const LatentAttention& layer);

// q [T, H * (nope_dim + rope dims)], kv [T, kv_lora_rank + rope dims] -> [T, H * v_head_dim].
Matrix attend_latent(Compute& compute, const KvPages& pages, const Step& step, const LatentAttention& layer, const Matrix& q,
                     const Matrix& kv);

}  // namespace tidegate

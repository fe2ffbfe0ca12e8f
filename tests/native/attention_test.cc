// Attention, routing and sampling of random shapes on heap buffers of exactly the right size: every read or write beyond
// them is the sanitizer's to find, and a result that used a number nobody wrote is not a number.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "attention.h"
#include "route.h"
#include "sample.h"

using namespace tidegate;

namespace {

std::mt19937 generator(1);

int pick(int low, int high) { return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1)); }
bool flip() { return pick(0, 1) == 1; }

std::vector<float> randoms(std::int64_t count) {
  std::vector<float> numbers(static_cast<std::size_t>(count));
  for (float& x : numbers) x = static_cast<float>(pick(-1000, 1000)) / 1000.0f;
  return numbers;
}

struct Case {
  bool is_latent = pick(0, 2) == 0;
  KvFormat format = static_cast<KvFormat>(pick(0, 2));
  int kv_heads = is_latent ? 1 : pick(1, 3), group = pick(1, 9), head_dim = pick(1, 40), v_head_dim = pick(1, 80);
  int half_rope = is_latent ? pick(1, 6) : pick(0, head_dim / 2), rank = pick(1, 50), nope = pick(1, 40);
  int heads = kv_heads * group, k_dim = is_latent ? rank + 2 * half_rope : head_dim;
  std::vector<float> inv_freq = randoms(half_rope), sinks = randoms(heads), norm = randoms(is_latent ? rank : head_dim);
  std::vector<float> k_up = randoms(align_up(heads * rank, kPanelRows) * nope);
  std::vector<float> v_up = randoms(align_up(heads * v_head_dim, kPanelRows) * rank);
  RopeTable rope{inv_freq.data(), half_rope, 1.0f, flip()};
};

PackedMatrix packed(const std::vector<float>& w, std::int64_t n, std::int64_t k) {
  return {reinterpret_cast<const std::uint8_t*>(w.data()), {}, n, k, nullptr};
}

Matrix latent(Compute& compute, const KvPages& pages, const Step& step, Case& c) {
  const int q_width = c.heads * (c.nope + 2 * c.half_rope);
  const LatentAttention layer{1, c.heads, c.rank, c.nope, c.v_head_dim, 0.3f, flip() ? 0 : 20, {c.norm.data(), nullptr, 1e-6f, c.rank},
                              nullptr, &c.rope, packed(c.k_up, c.heads * c.rank, c.nope),
                              packed(c.v_up, c.heads * c.v_head_dim, c.rank)};
  check_layer(layer);
  auto q = randoms(step.num_tokens() * q_width), kv = randoms(step.num_tokens() * c.k_dim);
  return attend_latent(compute, pages, step, layer, {q.data(), step.num_tokens(), q_width}, {kv.data(), step.num_tokens(), c.k_dim});
}

Matrix grouped(Compute& compute, const KvPages& pages, const Step& step, Case& c) {
  const int width = (c.heads + c.kv_heads) * c.head_dim + c.kv_heads * c.v_head_dim;
  const NormWeights norm{c.norm.data(), nullptr, 1e-6f, c.head_dim};
  const GroupedAttention layer{1, c.heads, c.kv_heads, c.head_dim, c.v_head_dim, 0.3f, 0.9f, flip() ? 0 : pick(1, 400),
                               GroupedAttention::QkNorm::head, norm, norm, flip() ? c.sinks.data() : nullptr, &c.rope};
  check_layer(layer);
  auto qkv = randoms(step.num_tokens() * width);
  return attend(compute, pages, step, layer, {qkv.data(), step.num_tokens(), width});
}

// One sequence in random chunks, in pages full of numbers that are none.
bool attention_is_clean(Compute& compute) {
  Case c;
  const int context = pick(1, 1300), num_pages = (context + kPageTokens - 1) / kPageTokens, layers = 2;
  const int number_bytes = c.format == KvFormat::f32 ? 4 : c.format == KvFormat::f16 ? 2 : 1;
  const int scale_bytes = c.format != KvFormat::int8 ? 0 : c.is_latent ? 4 : 8;
  const int head_bytes = (c.k_dim + (c.is_latent ? 0 : c.v_head_dim)) * number_bytes + scale_bytes;
  std::vector<std::uint8_t> memory(static_cast<std::size_t>(num_pages * layers * kPageTokens * c.kv_heads) *
                                   static_cast<std::size_t>(head_bytes), 0xff);
  const KvPages pages(memory.data(), memory.size(), layers, c.kv_heads, c.k_dim, c.is_latent ? 0 : c.v_head_dim, c.format);
  std::vector<std::int32_t> table(static_cast<std::size_t>(num_pages));
  for (int i = 0; i < num_pages; ++i) table[static_cast<std::size_t>(i)] = num_pages - 1 - i;
  for (int start = 0, count; start < context; start += count) {
    count = std::min(context - start, pick(1, 500));
    std::vector<std::int32_t> positions, sequences(static_cast<std::size_t>(count), 0);
    for (int i = 0; i < count; ++i) positions.push_back(start + i);
    const Step step(count, positions.data(), sequences.data(), table.data(), 1, num_pages, num_pages);
    compute.workspace.release(0);
    const Matrix out = (c.is_latent ? latent : grouped)(compute, pages, step, c);
    for (std::int64_t i = 0; i < out.rows * out.cols; ++i)
      if (out.data[i] != out.data[i]) return false;
  }
  return true;
}

void route_and_sample(Compute& compute) {
  const int experts = pick(2, 70), hidden = pick(1, 90), tokens = pick(1, 100);
  auto weight = randoms(experts * hidden), x = randoms(tokens * hidden), logits = randoms(pick(1, 500));
  RouterParams router;
  router.weight = weight.data();
  router.hidden = hidden;
  router.num_experts = experts;
  router.top_k = 2;
  check_router(router);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens) * 2);
  std::vector<float> weights(ids.size());
  compute.workspace.release(0);
  route(compute, {x.data(), tokens, hidden}, router, ids.data(), weights.data());
  const auto vocabulary = static_cast<std::int64_t>(logits.size());
  choose_token(logits.data(), vocabulary, {}, {0.7, pick(0, 40), 0.9, 0.0, 0.5});
  log_probs(logits.data(), vocabulary, 0, 5);
}

}  // namespace

int main() {
  constexpr std::size_t kWorkspaceBytes = 48 << 20;
  const std::unique_ptr<std::uint8_t, decltype(&std::free)> memory(
      static_cast<std::uint8_t*>(std::aligned_alloc(64, kWorkspaceBytes)), &std::free);
  const std::vector<Isa> isas = available_isas();
  for (std::size_t round = 0; round < 60; ++round) {
    Compute compute(pick(1, 3), memory.get(), kWorkspaceBytes, isas[round % isas.size()]);
    if (!attention_is_clean(compute)) {
      std::printf("attention_test: round %zu used a number that nobody wrote\n", round);
      return 1;
    }
    route_and_sample(compute);
  }
  std::puts("attention_test: ok");
}

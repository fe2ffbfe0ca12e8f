#include "step.h"

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tidegate {

KvPages::KvPages(std::uint8_t* data, std::size_t bytes, int num_layers, int kv_heads, int k_dim, int v_dim, KvFormat format)
    : data_(data), num_layers_(num_layers), kv_heads_(kv_heads), k_dim_(k_dim), v_dim_(v_dim), format_(format) {
  layer_bytes_ = kv_heads_ * (head_bytes(k_dim_) + head_bytes(v_dim_));
  const std::size_t page_bytes = layer_bytes_ * static_cast<std::size_t>(num_layers_);
  if (page_bytes == 0 || bytes % page_bytes != 0)
    throw std::invalid_argument(std::to_string(bytes) + " bytes of KV cache are not whole pages of " +
                                std::to_string(page_bytes) + " bytes");
  num_pages_ = static_cast<std::int64_t>(bytes / page_bytes);
}

Step::Step(std::int64_t num_tokens, const std::int32_t* positions, const std::int32_t* sequences,
           const std::int32_t* block_tables, std::int64_t num_sequences, std::int64_t max_pages, std::int64_t num_pages)
    : num_tokens_(num_tokens), positions_(positions) {
  static std::atomic<std::int64_t> steps{0};
  number_ = ++steps;
  pages_.reserve(static_cast<std::size_t>(num_tokens));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int64_t sequence = sequences[t], page = positions[t] / kPageTokens;
    if (sequence < 0 || sequence >= num_sequences || positions[t] < 0 || page >= max_pages)
      throw std::invalid_argument("token " + std::to_string(t) + ": sequence or position is outside the block tables");
    const std::int32_t* const pages = block_tables + sequence * max_pages;
    pages_.push_back(pages[page]);
    if (t > 0 && sequences[t - 1] == sequence) {
      if (positions[t] <= positions[t - 1])
        throw std::invalid_argument("token " + std::to_string(t) + ": positions of a sequence must increase");
      ++segments_.back().num_tokens;
    } else {
      segments_.push_back({t, 1, pages});
    }
  }
  for (const Segment& s : segments_) {
    const std::int64_t last = positions[s.first_token + s.num_tokens - 1] / kPageTokens;
    for (std::int64_t p = 0; p <= last; ++p)
      if (s.pages[p] < 0 || s.pages[p] >= num_pages)
        throw std::invalid_argument("KV page " + std::to_string(s.pages[p]) + " is not one of " + std::to_string(num_pages));
  }
}

RopeTable::RopeTable(const float* inv_freq, std::int64_t half_dims, float factor, bool interleaved)
    : inv_freq_(inv_freq, inv_freq + half_dims), factor_(factor), interleaved_(interleaved) {}

void RopeTable::prepare(const Step& step) {
  if (prepared_ == step.number()) return;
  const std::size_t half = inv_freq_.size(), count = static_cast<std::size_t>(step.num_tokens()) * half;
  cos_.resize(count);
  sin_.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    // One float32 product, then cosine and sine in float32, as transformers does.
    const float angle = static_cast<float>(step.position(static_cast<std::int64_t>(i / half))) * inv_freq_[i % half];
    cos_[i] = std::cos(angle) * factor_;
    sin_[i] = std::sin(angle) * factor_;
  }
  prepared_ = step.number();
}

}  // namespace tidegate

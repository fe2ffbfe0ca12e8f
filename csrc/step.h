// What a forward pass is about: its tokens, where the keys and values of their sequences lie, and their rotations.
#pragma once
#include <cstdint>
#include <vector>

#include "float_kernels.h"

namespace tidegate {

// KV pages as KvLayout of backends/operands.py describes them. `data` belongs to somebody else.
class KvPages {
 public:
  // Throws std::invalid_argument if bytes is not a whole number of pages of kPageTokens positions.
  KvPages(std::uint8_t* data, std::size_t bytes, int num_layers, int kv_heads, int k_dim, int v_dim, KvFormat format);

  std::int64_t num_pages() const { return num_pages_; }
  int kv_heads() const { return kv_heads_; }
  int k_dim() const { return k_dim_; }
  int v_dim() const { return v_dim_; }
  KvFormat format() const { return format_; }
  int num_layers() const { return num_layers_; }
  bool keys_by_token() const { return v_dim_ == 0; }
  std::size_t element_bytes() const { return format_ == KvFormat::f32 ? 4 : format_ == KvFormat::f16 ? 2 : 1; }
  // First key or value of a head in a page's part of a layer.
  std::uint8_t* keys(std::int64_t page, int layer, int head) const {
    return layer_at(page, layer) + static_cast<std::size_t>(head) * head_bytes(k_dim_);
  }
  std::uint8_t* values(std::int64_t page, int layer, int head) const {
    return layer_at(page, layer) + kv_heads_ * head_bytes(k_dim_) + static_cast<std::size_t>(head) * head_bytes(v_dim_);
  }

 private:
  // A head's keys or values in a page, with the scales of int8.
  std::size_t head_bytes(int dim) const {
    const std::size_t scale_bytes = format_ == KvFormat::int8 && dim > 0 ? sizeof(float) : 0;
    return kPageTokens * (static_cast<std::size_t>(dim) * element_bytes() + scale_bytes);
  }
  std::uint8_t* layer_at(std::int64_t page, int layer) const {
    return data_ + static_cast<std::size_t>(page * num_layers_ + layer) * layer_bytes_;
  }

  std::uint8_t* data_;
  std::int64_t num_pages_;
  int num_layers_, kv_heads_, k_dim_, v_dim_;
  KvFormat format_;
  std::size_t layer_bytes_;
};

// Consecutive tokens of one sequence, by position.
struct Segment {
  std::int64_t first_token, num_tokens;
  const std::int32_t* pages;  // the sequence's row of the block table
};

class Step {
 public:
  // The arrays are borrowed: positions and sequences [num_tokens], block_tables [num_sequences][max_pages]. Throws
  // std::invalid_argument where tokens of a sequence are not in order, or a page that is needed is not one of num_pages.
  Step(std::int64_t num_tokens, const std::int32_t* positions, const std::int32_t* sequences,
       const std::int32_t* block_tables, std::int64_t num_sequences, std::int64_t max_pages, std::int64_t num_pages);

  std::int64_t number() const { return number_; }  // no other step of the process has it
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t position(std::int64_t token) const { return positions_[token]; }
  std::int64_t page_of(std::int64_t token) const { return pages_[static_cast<std::size_t>(token)]; }
  const std::vector<Segment>& segments() const { return segments_; }

 private:
  std::int64_t number_, num_tokens_;
  const std::int32_t* positions_;
  std::vector<std::int32_t> pages_;  // [num_tokens]: the page each token's key and value go to
  std::vector<Segment> segments_;
};

// Cosines and sines for the tokens of a step. `prepare` before use; it costs nothing if the step is the same.
class RopeTable {
 public:
  // inv_freq [dims / 2] is copied.
  RopeTable(const float* inv_freq, std::int64_t half_dims, float factor, bool interleaved);

  void prepare(const Step& step);
  int dims() const { return static_cast<int>(2 * inv_freq_.size()); }
  bool interleaved() const { return interleaved_; }
  const float* cos(std::int64_t token) const { return cos_.data() + token * static_cast<std::int64_t>(inv_freq_.size()); }
  const float* sin(std::int64_t token) const { return sin_.data() + token * static_cast<std::int64_t>(inv_freq_.size()); }

 private:
  std::vector<float> inv_freq_, cos_, sin_;
  float factor_;
  bool interleaved_;
  std::int64_t prepared_ = 0;
};

}  // namespace tidegate

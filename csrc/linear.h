// Products with packed weights. Results and scratch come from the workspace.
#pragma once
#include "compute.h"
#include "format.h"
#include "kernels.h"
#include "tensor.h"

namespace tidegate {

// What a chunk of work in a product reads, or computes as long as reading it takes: long enough to hide the claim and the first
// misses, short enough to share fairly.
inline constexpr std::int64_t kChunkBytes = 96 << 10;

// Inputs of many tokens prepared for one weight format: full tiles, and a last one with the rest.
class PreparedRows {
 public:
  PreparedRows() = default;
  // Room for `tokens` rows of k inputs, from the workspace. Nothing is prepared yet.
  PreparedRows(Compute& compute, const WeightFormat& format, std::int64_t tokens, std::int64_t k, TileShape shape);
  // Prepares the rows of x, which may be wider than k.
  static PreparedRows of(Compute& compute, const WeightFormat& format, const Matrix& x, std::int64_t k, TileShape shape);
  // Copies token `from` of `source` (same format and k, tiles of one token) to token `to`.
  void copy_row(const PreparedRows& source, std::int64_t from, std::int64_t to) const;

  std::int64_t tokens() const { return tokens_; }
  std::int64_t num_tiles() const { return (tokens_ + shape_.tokens - 1) / shape_.tokens; }
  int tile_tokens() const { return shape_.tokens; }
  // Which row of which tile a token is.
  Tile tile_of(std::int64_t token) const { return tile(token / shape_.tokens); }
  int row_of(std::int64_t token) const { return static_cast<int>(token % shape_.tokens); }
  Tile tile(std::int64_t index) const {
    const std::int64_t first = index * shape_.tokens, left = tokens_ - first;
    const int count = left < shape_.tokens ? static_cast<int>(left) : shape_.tokens;
    // Built in one go: a copy that is then corrected makes the processor wait for its own stores, and all work before.
    if (all_.values) return {count, nullptr, nullptr, nullptr, all_.values + first * padded_k_, 0};
    return {count, all_.codes + first * padded_k_, all_.scales + first * groups_, all_.sums + first * groups_, nullptr,
            count > shape_.interleaved ? padded_k_ : 0};
  }

 private:
  std::int64_t tokens_ = 0, padded_k_ = 0, groups_ = 0;
  TileShape shape_;
  Tile all_;
};

// How a product walks over the panels of a matrix for a number of tokens.
struct Walk {
  Walk(const WeightFormat& format, std::int64_t k, std::int64_t tokens, std::int64_t passes);
  // Panels that are multiplied together. One or two tokens wait for memory, and one stream of it is fastest; more tokens
  // wait for arithmetic, and two panels share the loads of the inputs.
  int panels;
  // What pass `pass` over weights should fetch, given where the weights begin that come after them.
  const std::uint8_t* prefetch(const std::uint8_t* weights, const std::uint8_t* next, std::int64_t pass) const {
    return is_stream ? weights + kStreamBytes : next + pass * share_bytes;
  }
  int prefetch_lines;  // with every group (f32, bf16: with every two inputs); kernels fetch one more for a line of multipliers

 private:
  static constexpr std::int64_t kStreamBytes = 6 << 10;
  bool is_stream;
  std::int64_t share_bytes;
};

// [T, k] -> [T, n], plus the bias if there is one. The result is in the workspace.
Matrix linear(Compute& compute, const Matrix& x, const PackedMatrix& weight);

// The product of x (which may be wider than weight.k) and its bias, into `out` with rows `out_stride` apart.
void product(Compute& compute, const Matrix& x, const PackedMatrix& weight, float* out, std::int64_t out_stride);

// The same of rows `prepared` for the weight's format.
void multiply(Compute& compute, const PreparedRows& rows, const PackedMatrix& weight, float* out, std::int64_t out_stride);

// act(gate) * up with gate = columns :n/2 of gate_up [T, n], up = the rest; then the down projection.
Matrix gated_mlp(Compute& compute, const Matrix& x, const PackedMatrix& gate_up, const PackedMatrix& down,
                 const ActivationParams& activation);

}  // namespace tidegate

// The inner loops, one table of function pointers an instruction set. Everything here is one thread's work on one tile
// of tokens; threads, memory and the shape of a whole operation are linear.cc's and moe.cc's business.
//
// Batch invariance: what a kernel computes for a token is one fixed sequence of operations, the same in a tile of one
// token and in a full one, and the same on every instruction set (integer sums are exact; float sums are fused
// multiply-adds in rising order of inputs). f32 and bf16 keep two sums, of even and of odd inputs, added at the end.
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "format.h"

namespace tidegate {

// Inputs of up to tile_shape(format).tokens tokens, prepared for a weight format. The tokens are interleaved so that a kernel
// walks through memory in one direction: for integer formats `codes` is [K/4][tokens][4] int8, `scales` and `sums`
// [groups][tokens]; for f32 and bf16 `values` is [K][tokens]. K is padded with zeros to the format's multiple.
// Matrix units want rows instead: then `codes` is [tokens][row_bytes].
struct Tile {
  int tokens = 0;
  std::int8_t* codes = nullptr;
  float* scales = nullptr;
  std::int32_t* sums = nullptr;  // sum of a group's codes, times what the instruction set's kernel wants
  float* values = nullptr;
  std::int64_t row_bytes = 0;  // 0: interleaved

  bool has_rows() const { return row_bytes > 0 || tokens == 1; }
  // Where the codes of four inputs of token m, from input i on, are.
  std::int8_t* codes_at(std::int64_t i, int m) const {
    return codes + (row_bytes > 0 ? m * row_bytes + i : i * tokens + 4 * m);
  }
};

// Tiles hold up to `tokens` tokens; those of more than `interleaved` have their codes in rows.
struct TileShape {
  int tokens = 1, interleaved = 1;
};

// One or two panels of 16 rows against one tile of tokens. Two panels share the loads of the inputs.
struct TileJob {
  std::int64_t k;  // padded
  int group;
  Tile tile;
  struct Panel {
    const std::uint8_t* weights;
    float* out;  // out[token * out_stride + row]
    int rows;    // 1..16 rows are stored
    // Where the weights that are wanted next begin; `prefetch_lines` cache lines are fetched with every group, and
    // one with every line of multipliers.
    const std::uint8_t* prefetch;
  } panels[2];
  std::int64_t out_stride;
  int prefetch_lines;
};

enum class Activation { silu, gelu, gelu_tanh, clamped_swiglu };

struct ActivationParams {
  Activation kind = Activation::silu;
  float alpha = 0, limit = 0;  // clamped_swiglu only
};

constexpr int kMaxTileTokens = 16;

struct Kernels {
  using TileFn = void (*)(const TileJob&);

  TileShape (*tile_shape)(const WeightFormat&);  // the widest tile
  int tile_panels;  // how many panels a kernel takes at most: two where registers allow
  // The kernel of a format for a tile of 1..tile_shape(format).tokens tokens and 1..tile_panels panels.
  TileFn (*tile_fn)(const WeightFormat&, int tokens, int panels);
  // Makes inputs [first, first + count) of token `m` of the tile from x; pads with zeros to the format's multiple, of
  // which `first` is one.
  void (*prepare)(const WeightFormat&, const float* x, std::int64_t first, std::int64_t count, const Tile& tile, int m);
  // gate[i] = act(gate[i]) * up[i].
  void (*activate)(const ActivationParams&, float* gate, const float* up, std::int64_t count);
  // out[i] = sum over k, in order, of weights[k] * parts[k * stride + i].
  void (*weighted_sum)(float* out, const float* parts, std::int64_t stride, const float* weights, int num_parts,
                       std::int64_t count);
};

// Runs a job of one or two panels.
void multiply_tile(const Kernels& table, const WeightFormat& format, const TileJob& job, int panels);

// Throws nothing; `isa` must be one of available_isas().
const Kernels& kernels(Isa isa);

}  // namespace tidegate

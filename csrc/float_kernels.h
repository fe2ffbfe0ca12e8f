// The float32 kernels behind norm, rope, attention and routing: one table an instruction set. All of them compute the same
// bits. They know nothing of threads, pages or layers; norm.cc, attention*.cc and route.cc call them.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace tidegate {

// Keys and values in memory. int8: one float32 scale a position and head, behind the codes of a page's area.
enum class KvFormat { f32, f16, int8 };

constexpr int kPageTokens = 16;  // positions of a KV page, and the lanes of a vector of scores
// Keys are attended in blocks of this many positions, counted from position 0: each gives a partial result, and those are
// merged in order. It is a constant because it fixes the order of the float operations of a query.
constexpr int kKeyBlock = 256;
constexpr int kBlockPages = kKeyBlock / kPageTokens;
constexpr int kPanelPages = 4;  // pages of keys turned at a time
constexpr int kAheadPages = 4;  // how far ahead pages are fetched

// Softmax over some keys, not yet divided: for num_rows queries the largest score, 16 partial sums of e^(score - max), and
// the values weighted likewise. A row that saw no key has max -infinity; its other numbers are zero.
struct Partial {
  float* max;   // [rows]
  float* sums;  // [rows][16]
  float* acc;   // [rows][v_dim]
};

// Queries of one KV head and sequence against one block of keys.
struct AttendBlock {
  const float* queries;  // [num_rows][k_dim], scaled
  int num_rows, k_dim, v_dim;
  const int *first, *last;     // [num_rows]: row r sees keys first[r]..last[r]-1 of the block, none if first >= last
  const void* const* k_pages;  // [kBlockPages]; only those that some row sees are read
  const void* const* v_pages;
  const void* const* next_k_pages;  // [kAheadPages]: keys that are likely to be wanted after this block, only prefetched
  KvFormat format;
  bool keys_by_token;   // k_pages are [16][k_dim], not [k_dim][16]
  int v_stride;         // numbers from one position's values to the next's
  float* scores;        // scratch [num_rows][kKeyBlock]
  float* panels;        // scratch [kPanelPages][k_dim][16], used if keys_by_token
  Partial out;
};

struct FloatKernels {
  // y = weight * x / rms(x), and the same with mean and bias. y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, std::int64_t n);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* y, std::int64_t n);
  // Rotates pairs in place by cos, sin [dims / 2]: (i, i + dims/2), or (2i, 2i+1) if interleaved.
  void (*rotate)(float* x, const float* cos, const float* sin, int dims, bool interleaved);
  void (*to_half)(const float* x, std::uint16_t* y, std::int64_t n);  // clamps to the finite range
  void (*attend_block)(const AttendBlock& block);
  // total += part, with both rescaled to their larger maximum.
  void (*merge)(const Partial& total, const Partial& part, int num_rows, int v_dim);
  // out [v_dim] = acc / sum of one row; *sink, if given, is one more score that has no value.
  void (*finish)(const float* acc, const float* sums, float max, const float* sink, float* out, int v_dim);
  // out[t * out_stride + c] = x[t] . w[c] for rows of n numbers.
  void (*dots)(const float* x, std::int64_t num_x, const float* w, std::int64_t num_w, std::int64_t n, float* out,
               std::int64_t out_stride);
};

const FloatKernels& float_kernels(Isa isa);

}  // namespace tidegate

// Latent attention: a product a head before and behind attend_cached.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace tidegate {
namespace {

// Absorbed queries and attended latents of many heads are large, so tokens go in passes of at most about this many bytes.
constexpr std::int64_t kPassBytes = 16 << 20;

void require(bool good, const char* what) {
  if (!good) throw std::invalid_argument(std::string("latent attention: ") + what);
}

// Rows of x and out by token and head: element i of head h of token t is at data[t * token_stride + h * head_stride + i].
struct HeadRows {
  float* data;
  std::int64_t token_stride, head_stride;
  float* at(std::int64_t token, std::int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// One product a head: out of head h = factor * (the h-th part of the weight's rows) * x of head h.
class HeadProduct {
 public:
  HeadProduct(Compute& compute, const PackedMatrix& weight, int heads, std::int64_t tokens)
      : compute_(compute), table_(kernels(compute.isa)), weight_(weight), heads_(heads), tokens_(tokens),
        rows_a_head_(weight.n / heads) {}

  void run(const HeadRows& x, const HeadRows& out, float factor) {
    const Scratch scratch(compute_.workspace);
    prepare(x);
    std::vector<std::int64_t> first_item{0};
    for (int h = 0; h < heads_; ++h) first_item.push_back(first_item.back() + end_panel(h) - first_panel(h));
    const std::int64_t cost = weight_.panel_bytes() * std::max<std::int64_t>(1, tokens_ / 5);
    const std::int64_t grain = std::clamp<std::int64_t>(kChunkBytes / std::max<std::int64_t>(cost, 1), 1, 64);
    compute_.pool.parallel_for(first_item.back(), grain, [&](std::int64_t begin, std::int64_t end, int) {
      auto h = std::upper_bound(first_item.begin(), first_item.end(), begin) - first_item.begin() - 1;
      for (std::int64_t item = begin; item < end; ++item) {
        while (item >= first_item[static_cast<std::size_t>(h) + 1]) ++h;
        multiply_panel(static_cast<int>(h), first_panel(h) + item - first_item[static_cast<std::size_t>(h)], out, factor);
      }
    });
  }

 private:
  std::int64_t first_panel(std::int64_t head) const { return head * rows_a_head_ / kPanelRows; }
  std::int64_t end_panel(std::int64_t head) const { return ((head + 1) * rows_a_head_ + kPanelRows - 1) / kPanelRows; }

  void prepare(const HeadRows& x) {
    for (int h = 0; h < heads_; ++h) inputs_.emplace_back(compute_, weight_.format, tokens_, weight_.k, table_.tile_shape(weight_.format));
    compute_.pool.parallel_for(tokens_ * heads_, 16, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t t = item / heads_, h = item % heads_;
        const PreparedRows& input = inputs_[static_cast<std::size_t>(h)];
        table_.prepare(weight_.format, x.at(t, h), 0, weight_.k, input.tile_of(t), input.row_of(t));
      }
    });
  }

  // A panel at the edge of a head's rows holds rows of its neighbour too: those are computed and dropped.
  void multiply_panel(int head, std::int64_t panel, const HeadRows& out, float factor) const {
    const std::int64_t panel_row = panel * kPanelRows, head_row = head * rows_a_head_;
    const std::int64_t begin = std::max(panel_row, head_row);
    const std::int64_t end = std::min(panel_row + kPanelRows, head_row + rows_a_head_);
    float products[kMaxTileTokens * kPanelRows];
    const PreparedRows& input = inputs_[static_cast<std::size_t>(head)];
    const Walk walk(weight_.format, weight_.k, tokens_, input.num_tiles());
    const std::uint8_t* const weights = weight_.data + panel * weight_.panel_bytes();
    const int rows = static_cast<int>(std::min<std::int64_t>(kPanelRows, weight_.n - panel_row));
    TileJob job;
    job.k = weight_.format.padded_k(weight_.k);
    job.group = weight_.format.group;
    job.out_stride = kPanelRows;
    job.prefetch_lines = walk.prefetch_lines;
    for (std::int64_t i = 0; i < input.num_tiles(); ++i) {
      job.tile = input.tile(i);
      job.panels[0] = {weights, products, rows, walk.prefetch(weights, weights + weight_.panel_bytes(), i)};
      multiply_tile(table_, weight_.format, job, 1);
      for (int m = 0; m < job.tile.tokens; ++m) {
        float* const to = out.at(i * input.tile_tokens() + m, head) + begin - head_row;
        const float* const from = products + m * kPanelRows + begin - panel_row;
        for (std::int64_t r = 0; r < end - begin; ++r) to[r] = factor * from[r];
      }
    }
  }

  Compute& compute_;
  const Kernels& table_;
  const PackedMatrix& weight_;
  const int heads_;
  const std::int64_t tokens_, rows_a_head_;
  std::vector<PreparedRows> inputs_;
};

// Token t's latent, normed, and its rotated key, to its page.
void write_latent(const FloatKernels& kernels, const KvPages& pages, const Step& step, const LatentAttention& a, std::int64_t t,
                  const float* kv, float* row) {
  const int rank = a.kv_lora_rank, k_dim = pages.k_dim();
  norm_row(kernels, a.kv_norm, kv, row);
  std::memcpy(row + rank, kv + rank, static_cast<std::size_t>(k_dim - rank) * sizeof(float));
  kernels.rotate(row + rank, a.rope->cos(t), a.rope->sin(t), a.rope->dims(), a.rope->interleaved());
  const std::int64_t slot = step.position(t) % kPageTokens;
  std::uint8_t* const keys = pages.keys(step.page_of(t), a.layer, 0);
  store_kv(kernels, pages, row, k_dim, keys + static_cast<std::size_t>(slot * k_dim) * pages.element_bytes(), keys, slot);
}

void check_input(const KvPages& pages, const Step& step, const LatentAttention& a, const Matrix& q, const Matrix& kv) {
  const int k_dim = a.kv_lora_rank + a.rope->dims();
  require(pages.kv_heads() == 1 && pages.k_dim() == k_dim && pages.v_dim() == 0 && a.layer < pages.num_layers(),
          "the KV cache has another shape");
  require(q.rows == step.num_tokens() && kv.rows == step.num_tokens(), "q and kv have not one row a token");
  require(q.cols == static_cast<std::int64_t>(a.num_heads) * (a.nope_dim + a.rope->dims()) && kv.cols == k_dim,
          "q or kv has another width");
}

}  // namespace

void check_layer(const LatentAttention& a) {
  require(a.num_heads > 0 && a.kv_lora_rank > 0 && a.nope_dim > 0 && a.v_head_dim > 0 && a.layer >= 0 && a.window >= 0,
          "sizes must be positive");
  require(a.rope != nullptr, "there is no rotation");
  require(a.kv_norm.width == a.kv_lora_rank, "the norm has another width");
  require(a.k_up.n == static_cast<std::int64_t>(a.num_heads) * a.kv_lora_rank && a.k_up.k == a.nope_dim, "k_up has another shape");
  require(a.v_up.n == static_cast<std::int64_t>(a.num_heads) * a.v_head_dim && a.v_up.k == a.kv_lora_rank, "v_up has another shape");
  require(a.k_up.bias == nullptr && a.v_up.bias == nullptr, "k_up and v_up have no bias");
}

Matrix attend_latent(Compute& compute, const KvPages& pages, const Step& step, const LatentAttention& a, const Matrix& q,
                     const Matrix& kv) {
  check_input(pages, step, a, q, kv);
  a.rope->prepare(step);
  const FloatKernels& kernels = float_kernels(compute.isa);
  const std::int64_t tokens = step.num_tokens(), heads = a.num_heads, rank = a.kv_lora_rank, k_dim = pages.k_dim();
  const std::int64_t rope_dims = a.rope->dims(), q_dim = a.nope_dim + rope_dims;
  const Matrix out = compute.workspace.matrix(tokens, heads * a.v_head_dim);
  const Scratch scratch(compute.workspace);
  const Matrix rows = compute.workspace.matrix(compute.pool.threads(), k_dim);
  compute.pool.parallel_for(tokens, 16, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t t = begin; t < end; ++t) write_latent(kernels, pages, step, a, t, kv.row(t), rows.row(thread));
  });

  const std::int64_t token_bytes = heads * (k_dim + rank) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t pass = std::min(tokens, std::max<std::int64_t>(1, kPassBytes / token_bytes));
  float* const absorbed = compute.workspace.array<float>(pass * heads * k_dim);
  const Matrix mixed = compute.workspace.matrix(pass, heads * rank);
  for (std::int64_t first = 0; first < tokens; first += pass) {
    const std::int64_t count = std::min(pass, tokens - first);
    HeadProduct(compute, a.k_up, a.num_heads, count)
        .run({q.row(first), q.cols, q_dim}, {absorbed, heads * k_dim, k_dim}, a.scale);
    compute.pool.parallel_for(count, 16, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = begin; t < end; ++t)
        for (std::int64_t h = 0; h < heads; ++h) {
          float* const part = absorbed + (t * heads + h) * k_dim + rank;
          std::memcpy(part, q.row(first + t) + h * q_dim + a.nope_dim, static_cast<std::size_t>(rope_dims) * sizeof(float));
          kernels.rotate(part, a.rope->cos(first + t), a.rope->sin(first + t), a.rope->dims(), a.rope->interleaved());
          for (std::int64_t d = 0; d < rope_dims; ++d) part[d] *= a.scale;
        }
    });
    attend_cached(compute, pages, step,
                  {absorbed, first, count, a.num_heads, static_cast<int>(k_dim), a.kv_lora_rank, static_cast<int>(k_dim), a.layer,
                   a.window, a.sinks}, {mixed.data, count, mixed.cols});
    HeadProduct(compute, a.v_up, a.num_heads, count)
        .run({mixed.data, mixed.cols, rank}, {out.row(first), out.cols, a.v_head_dim}, 1.0f);
  }
  return out;
}

}  // namespace tidegate

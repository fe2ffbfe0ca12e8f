#include "linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace tidegate {
namespace {

// Up to this many tokens the weights are streamed, one panel at a time.
constexpr std::int64_t kStreamTokens = 2;
// Up to about this many tokens a product waits for memory; beyond, its time grows with the tokens.
constexpr std::int64_t kFreeTokens = 5;
// Tokens whose prepared inputs stay in the second-level cache while several panels pass over them.
constexpr std::int64_t kBlockTokens = 128;
// Preparing fewer inputs than this is cheaper than waking a thread.
constexpr std::int64_t kSerialInputs = 16 << 10;

// How many steps of the walk make a chunk of work.
std::int64_t grain_of(const Compute& compute, const PackedMatrix& weight, const Walk& walk, std::int64_t tokens) {
  const std::int64_t step_bytes = std::max<std::int64_t>(1, walk.panels * weight.panel_bytes());
  const std::int64_t wanted = kChunkBytes / (step_bytes * std::max<std::int64_t>(1, tokens / kFreeTokens));
  const std::int64_t fair = weight.panels() / (4 * walk.panels * compute.pool.threads());
  return std::max<std::int64_t>(1, std::min(fair, tokens > kBlockTokens ? 2 : wanted));
}

void add_bias(const TileJob::Panel& panel, std::int64_t stride, int tokens, const float* bias) {
  for (int m = 0; m < tokens; ++m)
    for (int r = 0; r < panel.rows; ++r) panel.out[m * stride + r] += bias[r];
}

}  // namespace

PreparedRows::PreparedRows(Compute& compute, const WeightFormat& format, std::int64_t tokens, std::int64_t k,
                           TileShape shape)
    : tokens_(tokens), padded_k_(format.padded_k(k)), groups_(format.groups(k)),
      shape_(shape) {
  if (format.is_integer()) {
    all_.codes = compute.workspace.array<std::int8_t>(tokens * padded_k_);
    all_.scales = compute.workspace.array<float>(tokens * groups_);
    all_.sums = compute.workspace.array<std::int32_t>(tokens * groups_);
  } else {
    all_.values = compute.workspace.array<float>(tokens * padded_k_);
  }
}

PreparedRows PreparedRows::of(Compute& compute, const WeightFormat& format, const Matrix& x, std::int64_t k,
                              TileShape shape) {
  PreparedRows rows(compute, format, x.rows, k, shape);
  const auto prepare = kernels(compute.isa).prepare;
  const std::int64_t grain = std::max<std::int64_t>(1, kSerialInputs / std::max<std::int64_t>(1, k));
  compute.pool.parallel_for(x.rows, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t)
      prepare(format, x.row(t), 0, k, rows.tile_of(t), rows.row_of(t));
  });
  return rows;
}

void PreparedRows::copy_row(const PreparedRows& source, std::int64_t from, std::int64_t to) const {
  const Tile input = source.tile(from), output = tile_of(to);
  const int m = row_of(to);
  const std::int64_t stride = output.tokens;
  if (output.values) {
    for (std::int64_t i = 0; i < padded_k_; ++i) output.values[i * stride + m] = input.values[i];
    return;
  }
  if (output.has_rows())
    std::memcpy(output.codes_at(0, m), input.codes, static_cast<std::size_t>(padded_k_));
  else
    for (std::int64_t i = 0; i < padded_k_; i += 4) std::memcpy(output.codes_at(i, m), input.codes + i, 4);
  for (std::int64_t g = 0; g < groups_; ++g) {
    output.scales[g * stride + m] = input.scales[g];
    output.sums[g * stride + m] = input.sums[g];
  }
}

Walk::Walk(const WeightFormat& format, std::int64_t k, std::int64_t tokens, std::int64_t passes)
    : panels(tokens <= kStreamTokens ? 1 : 2), is_stream(tokens <= kStreamTokens),
      share_bytes(align_up((format.panel_bytes(k) + passes - 1) / passes, 64)) {
  const std::int64_t steps = format.is_integer() ? format.groups(k) : format.padded_k(k) / 2 + 1;
  const std::int64_t lines = std::max<std::int64_t>(0, share_bytes / 64 - format.multiplier_lines(k));
  prefetch_lines = static_cast<int>((lines + steps - 1) / steps);
}

void multiply(Compute& compute, const PreparedRows& rows, const PackedMatrix& weight, float* out, std::int64_t out_stride) {
  const Kernels& table = kernels(compute.isa);
  const std::int64_t panel_bytes = weight.panel_bytes(), num_tiles = rows.num_tiles(), num_panels = weight.panels();
  const std::int64_t block_tiles = std::max<std::int64_t>(1, kBlockTokens / rows.tile_tokens());
  const Walk walk(weight.format, weight.k, rows.tokens(), std::min(num_tiles, block_tiles));
  const auto work = [&](std::int64_t first_panel, std::int64_t t) {
    TileJob job;
    job.k = weight.format.padded_k(weight.k);
    job.group = weight.format.group;
    job.tile = rows.tile(t);
    job.out_stride = out_stride;
    job.prefetch_lines = walk.prefetch_lines;
    const int panels = static_cast<int>(std::min<std::int64_t>(walk.panels, num_panels - first_panel));
    for (int p = 0; p < panels; ++p) {
      const std::int64_t row = (first_panel + p) * kPanelRows;
      TileJob::Panel& panel = job.panels[p];
      panel.weights = weight.data + (first_panel + p) * panel_bytes;
      panel.out = out + t * rows.tile_tokens() * out_stride + row;
      panel.rows = static_cast<int>(std::min<std::int64_t>(kPanelRows, weight.n - row));
      panel.prefetch = walk.prefetch(panel.weights, panel.weights + walk.panels * panel_bytes, t % block_tiles);
    }
    multiply_tile(table, weight.format, job, panels);
    for (int p = 0; p < panels && weight.bias; ++p)
      add_bias(job.panels[p], out_stride, job.tile.tokens, weight.bias + (first_panel + p) * kPanelRows);
  };
  const std::int64_t steps = (num_panels + walk.panels - 1) / walk.panels;
  compute.pool.parallel_for(steps, grain_of(compute, weight, walk, rows.tokens()), [&](auto begin, auto end, int) {
    for (std::int64_t block = 0; block < num_tiles; block += block_tiles)
      for (std::int64_t step = begin; step < end; ++step)
        for (std::int64_t t = block; t < std::min(block + block_tiles, num_tiles); ++t) work(step * walk.panels, t);
  });
}

namespace {

// Two rows a token: its codes, then the codes of the rest.
PreparedRows prepare_wide(Compute& compute, const WeightFormat& format, const Matrix& x, std::int64_t k) {
  const Kernels& table = kernels(compute.isa);
  const PreparedRows rows(compute, format, 2 * x.rows, k, table.tile_shape(format));
  const PreparedRows high = PreparedRows::of(compute, format, x, k, {});
  const Matrix rest = compute.workspace.matrix(x.rows, k);
  const std::int64_t grain = std::max<std::int64_t>(1, kSerialInputs / k);
  compute.pool.parallel_for(x.rows, grain, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t t = begin; t < end; ++t) {
      const Tile codes = high.tile(t);
      for (std::int64_t i = 0; i < k; ++i)
        rest.row(t)[i] = x.row(t)[i] - codes.scales[i / format.group] * static_cast<float>(codes.codes[i]);
      const std::int64_t low = 2 * t + 1;
      rows.copy_row(high, t, 2 * t);
      table.prepare(format, rest.row(t), 0, k, rows.tile_of(low), rows.row_of(low));
    }
  });
  return rows;
}

}  // namespace

void product(Compute& compute, const Matrix& x, const PackedMatrix& weight, float* out, std::int64_t out_stride) {
  if (x.rows == 0) return;  // a step whose logits nobody wants
  const Scratch scratch(compute.workspace);
  if (!weight.wide_inputs || !weight.format.is_integer())
    return multiply(
        compute, PreparedRows::of(compute, weight.format, x, weight.k, kernels(compute.isa).tile_shape(weight.format)), weight,
        out, out_stride);
  PackedMatrix unbiased = weight;
  unbiased.bias = nullptr;
  const Matrix parts = compute.workspace.matrix(2 * x.rows, weight.n);
  multiply(compute, prepare_wide(compute, weight.format, x, weight.k), unbiased, parts.data, parts.cols);
  for (std::int64_t t = 0; t < x.rows; ++t) {
    float* const row = out + t * out_stride;
    for (std::int64_t i = 0; i < weight.n; ++i) row[i] = parts.row(2 * t)[i] + parts.row(2 * t + 1)[i];
    if (weight.bias)
      for (std::int64_t i = 0; i < weight.n; ++i) row[i] += weight.bias[i];
  }
}

Matrix linear(Compute& compute, const Matrix& x, const PackedMatrix& weight) {
  if (x.cols != weight.k) throw std::invalid_argument("linear: x has another width than the weight");
  const Matrix out = compute.workspace.matrix(x.rows, weight.n);
  product(compute, x, weight, out.data, out.cols);
  return out;
}

Matrix gated_mlp(Compute& compute, const Matrix& x, const PackedMatrix& gate_up, const PackedMatrix& down,
                 const ActivationParams& activation) {
  if (x.cols != gate_up.k || gate_up.n != 2 * down.k) throw std::invalid_argument("gated_mlp: shapes do not fit");
  const Matrix out = compute.workspace.matrix(x.rows, down.n);
  const Scratch scratch(compute.workspace);
  const Matrix hidden = linear(compute, x, gate_up);
  const Kernels& table = kernels(compute.isa);
  compute.pool.parallel_for(x.rows, std::max<std::int64_t>(1, kSerialInputs / down.k), [&](auto begin, auto end, int) {
    for (std::int64_t t = begin; t < end; ++t) table.activate(activation, hidden.row(t), hidden.row(t) + down.k, down.k);
  });
  product(compute, hidden, down, out.data, out.cols);
  return out;
}

}  // namespace tidegate

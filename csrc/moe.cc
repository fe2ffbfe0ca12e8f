#include "moe.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace tidegate {
namespace {

// Experts are computed together until they have this many pairs, which bounds the memory for gathered inputs.
constexpr std::int64_t kBatchPairs = 1024;
// Rows of the hidden layer that are computed, activated and prepared together. Gate and up are two places in memory, and each
// change between them costs a few misses: weights that are read once come in blocks as large as lets every thread have some.
// Weights that several tiles of tokens pass over should stay in a near cache.
constexpr int kMinBlockRows = 32;
constexpr int kMaxBlockRows = 256;
constexpr int kBlocksPerThread = 4;
static_assert(kMaxBlockRows % kMaxGroup == 0);

// Threads must not be woken for less than this many numbers.
constexpr std::int64_t kSerialNumbers = 16 << 10;

Matrix checked(const Matrix& x, const ExpertLayout& layout) {
  if (x.cols != layout.hidden_size) throw std::invalid_argument("moe: x has another width than the experts");
  return x;
}

TileShape narrower_shape(const Kernels& table, const ExpertLayout& layout) {
  const TileShape hidden = table.tile_shape(layout.format), out = table.tile_shape(layout.down_format);
  return hidden.tokens < out.tokens ? hidden : out;
}

const float* bias_at(const std::uint8_t* blob, const ExpertLayout& layout, int part) {
  return reinterpret_cast<const float*>(blob + layout.bias_offset + part * align_up(4 * layout.expert_dim, 64));
}

void add_bias(float* out, std::int64_t stride, int tokens, const float* bias, std::int64_t count) {
  for (int m = 0; m < tokens; ++m)
    for (std::int64_t i = 0; i < count; ++i) out[m * stride + i] += bias[i];
}

}  // namespace

// One expert of a batch: its bytes, the pairs that chose it, and its rows on the way through the block.
struct MoeStep::Expert {
  const std::uint8_t* blob = nullptr;
  const std::int32_t* pairs = nullptr;
  std::int64_t count = 0;
  PreparedRows gathered;  // empty when a single token needs no gathering
  PreparedRows hidden;

  std::int64_t num_tiles() const { return hidden.num_tiles(); }
};

MoeStep::MoeStep(Compute& compute, const Matrix& x, const std::int32_t* ids, const float* weights,
                 std::int64_t experts_per_token, const ExpertLayout& layout, const ActivationParams& activation)
    : compute_(compute), kernels_(kernels(compute.isa)), tile_shape_(narrower_shape(kernels_, layout)), tokens_(x.rows),
      experts_per_token_(experts_per_token), weights_(weights), layout_(layout), activation_(activation),
      out_(compute.workspace.matrix(checked(x, layout).rows, x.cols)), mark_(compute.workspace.mark()),
      pairs_(compute.workspace.array<float>(x.rows * experts_per_token * x.cols)),
      inputs_(PreparedRows::of(compute, layout.format, x, x.cols, {})) {
  // Counting sort of the pairs by expert.
  const std::int64_t num_pairs = tokens_ * experts_per_token;
  std::int32_t last = -1;
  for (std::int64_t p = 0; p < num_pairs; ++p) {
    if (ids[p] < 0) throw std::out_of_range("moe: a negative expert id");
    last = std::max(last, ids[p]);
  }
  starts_.assign(static_cast<std::size_t>(last) + 2, 0);
  for (std::int64_t p = 0; p < num_pairs; ++p) ++starts_[static_cast<std::size_t>(ids[p]) + 1];
  for (std::size_t e = 1; e < starts_.size(); ++e) starts_[e] += starts_[e - 1];
  by_expert_.resize(static_cast<std::size_t>(num_pairs));
  std::vector<std::int64_t> next(starts_.begin(), starts_.end() - 1);
  for (std::int64_t p = 0; p < num_pairs; ++p)
    by_expert_[static_cast<std::size_t>(next[static_cast<std::size_t>(ids[p])]++)] = static_cast<std::int32_t>(p);
}

int MoeStep::run(const std::vector<int>& experts, const std::vector<int>& slots, SlotSource& source) {
  if (experts.size() != slots.size()) throw std::invalid_argument("moe: as many slots as experts are needed");
  struct Waiting { Expert expert; int slot; };
  std::vector<Waiting> waiting;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto e = static_cast<std::size_t>(experts[i]);
    if (experts[i] < 0 || e + 1 >= starts_.size() || starts_[e] == starts_[e + 1]) continue;
    Expert expert;
    expert.pairs = by_expert_.data() + starts_[e];
    expert.count = starts_[e + 1] - starts_[e];
    waiting.push_back({expert, slots[i]});
  }
  std::vector<Expert> batch;
  while (!waiting.empty()) {
    // Nothing ready: loads are asked for in this order, so the first one is the one to wait for.
    if (std::none_of(waiting.begin(), waiting.end(), [&](const Waiting& w) { return source.is_ready(w.slot); }) &&
        !source.wait_ready(waiting.front().slot))
      return waiting.front().slot;
    std::int64_t num_pairs = 0;
    batch.clear();
    std::vector<Waiting> rest;
    for (Waiting& w : waiting) {
      if (!source.is_ready(w.slot) || (!batch.empty() && num_pairs + w.expert.count > kBatchPairs)) {
        rest.push_back(w);
        continue;
      }
      w.expert.blob = source.wait_ready(w.slot);
      if (!w.expert.blob) return w.slot;
      num_pairs += w.expert.count;
      batch.push_back(w.expert);
    }
    compute_batch(batch);
    pairs_done_ += num_pairs;
    waiting.swap(rest);
  }
  return -1;
}

void MoeStep::compute_batch(std::vector<Expert>& batch) {
  const Scratch scratch(compute_.workspace);
  bool any_gathered = false;
  for (Expert& expert : batch) {
    expert.hidden = PreparedRows(compute_, layout_.down_format, expert.count, layout_.expert_dim, tile_shape_);
    if (expert.count == 1) continue;
    any_gathered = true;
    expert.gathered = PreparedRows(compute_, layout_.format, expert.count, layout_.hidden_size, tile_shape_);
  }
  const auto num_experts = static_cast<std::int64_t>(batch.size());
  const auto at = [&](std::int64_t i) -> const Expert& { return batch[static_cast<std::size_t>(i)]; };
  if (any_gathered)
    compute_.pool.parallel_for(num_experts, 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t e = begin; e < end; ++e)
        for (std::int64_t i = 0; at(e).count > 1 && i < at(e).count; ++i)
          at(e).gathered.copy_row(inputs_, at(e).pairs[i] / experts_per_token_, i);
    });
  // One barrier for all experts after the hidden layer and one after the output, not two an expert.
  const std::int64_t block_rows = block_rows_of(batch);
  const std::int64_t blocks = (layout_.expert_dim + block_rows - 1) / block_rows;
  const std::int64_t block_bytes = 2 * block_rows / kPanelRows * layout_.format.panel_bytes(layout_.hidden_size);
  compute_.pool.parallel_for(num_experts * blocks, std::max<std::int64_t>(1, kChunkBytes / std::max<std::int64_t>(1, block_bytes)),
                             [&](std::int64_t begin, std::int64_t end, int) {
                               for (std::int64_t i = begin; i < end; ++i) hidden_block(at(i / blocks), i % blocks * block_rows, block_rows);
                             });
  const std::int64_t panels = (layout_.hidden_size + kPanelRows - 1) / kPanelRows;
  const std::int64_t panel_bytes = layout_.down_format.panel_bytes(layout_.expert_dim);
  const std::int64_t grain = std::clamp<std::int64_t>(kChunkBytes / std::max<std::int64_t>(1, panel_bytes), 1, panels);
  const std::int64_t chunks = (panels + grain - 1) / grain;
  compute_.pool.parallel_for(num_experts * chunks, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t first = i % chunks * grain;
      down_panels(at(i / chunks), first, std::min(first + grain, panels));
    }
  });
}

std::int64_t MoeStep::block_rows_of(const std::vector<Expert>& batch) const {
  const std::int64_t unit = std::max(kMinBlockRows, layout_.down_format.group);
  if (std::any_of(batch.begin(), batch.end(), [](const Expert& expert) { return expert.num_tiles() > 1; })) return unit;
  const auto all_rows = static_cast<std::int64_t>(batch.size()) * layout_.expert_dim;
  const std::int64_t fair = all_rows / (kBlocksPerThread * compute_.pool.threads());
  return std::clamp<std::int64_t>(fair / unit * unit, unit, kMaxBlockRows);
}

Tile MoeStep::input_tile(const Expert& expert, std::int64_t t) const {
  return expert.count == 1 ? inputs_.tile(expert.pairs[0] / experts_per_token_) : expert.gathered.tile(t);
}

// Up to `block_rows` rows of the hidden layer: gate, up, activation, and ready for the down projection.
void MoeStep::hidden_block(const Expert& expert, std::int64_t first_row, std::int64_t block_rows) const {
  const std::int64_t rows = std::min(block_rows, layout_.expert_dim - first_row);
  const std::int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  const Walk walk(layout_.format, layout_.hidden_size, expert.count, expert.num_tiles());
  alignas(64) float gate[kMaxTileTokens * kMaxBlockRows], up[kMaxTileTokens * kMaxBlockRows];
  for (std::int64_t t = 0; t < expert.num_tiles(); ++t) {
    TileJob job;
    job.k = layout_.format.padded_k(layout_.hidden_size);
    job.group = layout_.format.group;
    job.tile = input_tile(expert, t);
    job.out_stride = block_rows;
    job.prefetch_lines = walk.prefetch_lines;
    // Step i makes a panel of gate (part 0) or up (part 1): gate and up together, or first all of gate, then all of up.
    for (std::int64_t i = 0; i < 2 * panels; i += walk.panels) {
      for (int p = 0; p < walk.panels; ++p) {
        const std::int64_t part = walk.panels == 2 ? p : i / panels, panel = walk.panels == 2 ? i / 2 : i % panels;
        const std::uint8_t* const weights = expert.blob + part * layout_.up_offset;
        const std::int64_t panel_bytes = layout_.format.panel_bytes(layout_.hidden_size);
        const std::int64_t at = first_row / kPanelRows + panel;
        // A single pass needs the next panel next; several passes need this block again, then the next block.
        const std::int64_t next = at + (expert.num_tiles() > 1 ? panels : 1);
        job.panels[p] = {weights + at * panel_bytes, (part == 0 ? gate : up) + panel * kPanelRows,
                         static_cast<int>(std::min<std::int64_t>(kPanelRows, rows - panel * kPanelRows)),
                         walk.prefetch(weights + at * panel_bytes, weights + next * panel_bytes, t)};
      }
      multiply_tile(kernels_, layout_.format, job, walk.panels);
    }
    if (layout_.has_bias) {
      add_bias(gate, block_rows, job.tile.tokens, bias_at(expert.blob, layout_, 0) + first_row, rows);
      add_bias(up, block_rows, job.tile.tokens, bias_at(expert.blob, layout_, 1) + first_row, rows);
    }
    const Tile hidden = expert.hidden.tile(t);
    for (int m = 0; m < job.tile.tokens; ++m) {
      kernels_.activate(activation_, gate + m * block_rows, up + m * block_rows, rows);
      kernels_.prepare(layout_.down_format, gate + m * block_rows, first_row, rows, hidden, m);
    }
  }
}

// Panels [begin, end) of the down projection, into the pairs.
void MoeStep::down_panels(const Expert& expert, std::int64_t begin, std::int64_t end) const {
  const std::int64_t panel_bytes = layout_.down_format.panel_bytes(layout_.expert_dim);
  const std::uint8_t* const weights = expert.blob + layout_.down_offset;
  const Walk walk(layout_.down_format, layout_.expert_dim, expert.count, expert.num_tiles());
  alignas(64) float out[kMaxTileTokens * 2 * kPanelRows];
  TileJob job;
  job.k = layout_.down_format.padded_k(layout_.expert_dim);
  job.group = layout_.down_format.group;
  job.out_stride = 2 * kPanelRows;
  job.prefetch_lines = walk.prefetch_lines;
  for (std::int64_t first = begin; first < end; first += walk.panels) {
    const std::int64_t row = first * kPanelRows;
    const int panels = static_cast<int>(std::min<std::int64_t>(walk.panels, end - first));
    const std::int64_t rows = std::min<std::int64_t>(panels * kPanelRows, layout_.hidden_size - row);
    for (std::int64_t t = 0; t < expert.num_tiles(); ++t) {
      job.tile = expert.hidden.tile(t);
      for (int p = 0; p < panels; ++p) {
        const std::uint8_t* const panel = weights + (first + p) * panel_bytes;
        job.panels[p] = {panel, out + p * kPanelRows, static_cast<int>(std::min<std::int64_t>(kPanelRows, rows - p * kPanelRows)),
                         walk.prefetch(panel, panel + walk.panels * panel_bytes, t)};
      }
      multiply_tile(kernels_, layout_.down_format, job, panels);
      if (layout_.has_bias) add_bias(out, job.out_stride, job.tile.tokens, bias_at(expert.blob, layout_, 2) + row, rows);
      for (int m = 0; m < job.tile.tokens; ++m) {
        float* const pair = pairs_ + expert.pairs[t * tile_shape_.tokens + m] * layout_.hidden_size;
        std::memcpy(pair + row, out + m * job.out_stride, static_cast<std::size_t>(rows) * sizeof(float));
      }
    }
  }
}

Matrix MoeStep::finish() {
  if (pairs_done_ != tokens_ * experts_per_token_)
    throw std::logic_error("moe: " + std::to_string(pairs_done_) + " of " + std::to_string(tokens_ * experts_per_token_) +
                           " (token, expert) pairs were computed");
  const std::int64_t width = layout_.hidden_size, numbers = std::max<std::int64_t>(1, width * experts_per_token_);
  compute_.pool.parallel_for(tokens_, std::max<std::int64_t>(1, kSerialNumbers / numbers), [&](auto begin, auto end, int) {
    for (std::int64_t t = begin; t < end; ++t)
      kernels_.weighted_sum(out_.row(t), pairs_ + t * experts_per_token_ * width, width, weights_ + t * experts_per_token_,
                            static_cast<int>(experts_per_token_), width);
  });
  compute_.workspace.release(mark_);
  return out_;
}

}  // namespace tidegate

// Queries against cached keys and values: cuts the work into items, runs the kernel over blocks of keys, merges.
//
// Blocks of kKeyBlock keys merge in order into a run of kRunBlocks blocks, runs merge in order into the result. Runs exist so
// that a long context can be spread over threads when there are few queries; they are merged the same way when it is not.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attention.h"

namespace tidegate {
namespace {

constexpr int kRunBlocks = 4;
constexpr std::int64_t kRunKeys = kRunBlocks * kKeyBlock;
constexpr std::int64_t kMaxRows = 48;            // query rows of one item
constexpr std::int64_t kMaxSplitBytes = 4 << 20;  // partial results of runs, when those are spread over threads

// Some rows (see Queries, counted from the step's first token) of one sequence and the keys that any of them sees.
struct RowBlock {
  const Segment* segment;
  std::int64_t first_row, num_rows;
  std::int64_t first_run, last_run;
  std::int64_t partial;  // index of the first of its runs among all runs
};

struct Carver {
  std::uint8_t* next;
  template <class T>
  T* take(std::int64_t count) {
    T* const result = reinterpret_cast<T*>(next);
    next += align_up(count * static_cast<std::int64_t>(sizeof(T)), 64);
    return result;
  }
};

class Cached {
 public:
  Cached(Compute& compute, const KvPages& kv, const Step& step, const Queries& queries, const Matrix& out)
      : compute_(compute), kernels_(float_kernels(compute.isa)), kv_(kv), step_(step), q_(queries), out_(out) {}

  void run();

 private:
  std::int64_t first_key(std::int64_t position) const {
    return q_.window > 0 ? std::max<std::int64_t>(0, position - q_.window + 1) : 0;
  }
  std::int64_t row_position(std::int64_t row) const { return step_.position(row / q_.group); }
  std::size_t partial_bytes(std::int64_t rows) const {
    return static_cast<std::size_t>(rows) * (q_.v_dim + kPageTokens + 1) * sizeof(float) + 3 * 64;
  }
  Partial carve_partial(Carver& carver, std::int64_t rows) const {
    return {carver.take<float>(rows), carver.take<float>(rows * kPageTokens), carver.take<float>(rows * q_.v_dim)};
  }

  void cut_rows(std::int64_t max_rows);
  void attend_run(const RowBlock& block, int head, std::int64_t run, const Partial& out, Carver scratch);
  void finish_rows(const RowBlock& block, int head, const Partial& total);
  void clear(const Partial& partial, std::int64_t rows) const;
  void run_whole();
  void run_split();
  std::size_t scratch_bytes() const;
  Carver scratch_of(int thread) const { return {scratch_ + static_cast<std::size_t>(thread) * scratch_bytes()}; }

  Compute& compute_;
  const FloatKernels& kernels_;
  const KvPages& kv_;
  const Step& step_;
  const Queries& q_;
  const Matrix& out_;
  std::vector<RowBlock> blocks_;
  std::int64_t num_runs_ = 0, max_rows_ = 0;
  std::uint8_t* scratch_ = nullptr;
};

void Cached::cut_rows(std::int64_t max_rows) {
  blocks_.clear();
  num_runs_ = 0;
  max_rows_ = 0;
  for (const Segment& s : step_.segments()) {
    const std::int64_t begin = std::max(s.first_token, q_.first_token) * q_.group;
    const std::int64_t end = std::min(s.first_token + s.num_tokens, q_.first_token + q_.num_tokens) * q_.group;
    for (std::int64_t row = begin; row < end; row += max_rows) {
      const std::int64_t rows = std::min(max_rows, end - row);
      const std::int64_t first = first_key(row_position(row)) / kRunKeys, last = row_position(row + rows - 1) / kRunKeys + 1;
      blocks_.push_back({&s, row, rows, first, last, num_runs_});
      num_runs_ += last - first;
      max_rows_ = std::max(max_rows_, rows);
    }
  }
}

std::size_t Cached::scratch_bytes() const {
  const std::size_t panels = kv_.keys_by_token() ? std::size_t{kPanelPages} * static_cast<std::size_t>(q_.k_dim) * kPageTokens : 0;
  const std::size_t rows = static_cast<std::size_t>(max_rows_);
  const std::size_t bytes =
      3 * partial_bytes(max_rows_) + (rows * kKeyBlock + panels) * sizeof(float) + 2 * rows * sizeof(int) + 4 * 64;
  return static_cast<std::size_t>(align_up(static_cast<std::int64_t>(bytes), 64));
}

void Cached::clear(const Partial& partial, std::int64_t rows) const {
  std::fill_n(partial.max, rows, -std::numeric_limits<float>::infinity());
  std::memset(partial.sums, 0, static_cast<std::size_t>(rows) * kPageTokens * sizeof(float));
  std::memset(partial.acc, 0, static_cast<std::size_t>(rows * q_.v_dim) * sizeof(float));
}

// One run of keys against the rows, into `out`.
void Cached::attend_run(const RowBlock& block, int head, std::int64_t run, const Partial& out, Carver scratch) {
  AttendBlock args{};
  const std::int64_t row = (head * q_.num_tokens - q_.first_token) * q_.group + block.first_row;
  args.queries = q_.rows + row * q_.k_dim;
  args.num_rows = static_cast<int>(block.num_rows);
  args.k_dim = q_.k_dim;
  args.v_dim = q_.v_dim;
  args.format = kv_.format();
  args.keys_by_token = kv_.keys_by_token();
  args.v_stride = q_.v_stride;
  args.out = carve_partial(scratch, block.num_rows);
  args.scores = scratch.take<float>(block.num_rows * kKeyBlock);
  int* const first = scratch.take<int>(block.num_rows);
  int* const last = scratch.take<int>(block.num_rows);
  args.first = first;
  args.last = last;
  args.panels = scratch.take<float>(0);
  clear(out, block.num_rows);
  const std::int64_t begin_key = first_key(row_position(block.first_row));
  const std::int64_t end_key = row_position(block.first_row + block.num_rows - 1) + 1;
  for (std::int64_t start = run * kRunKeys; start < std::min(end_key, (run + 1) * kRunKeys); start += kKeyBlock) {
    if (start + kKeyBlock <= begin_key) continue;
    for (std::int64_t r = 0; r < block.num_rows; ++r) {
      const std::int64_t position = row_position(block.first_row + r);
      first[r] = static_cast<int>(std::clamp<std::int64_t>(first_key(position) - start, 0, kKeyBlock));
      last[r] = static_cast<int>(std::clamp<std::int64_t>(position + 1 - start, 0, kKeyBlock));
    }
    const void *k_pages[kBlockPages + kAheadPages] = {}, *v_pages[kBlockPages + kAheadPages] = {};
    const std::int64_t first_page = start / kPageTokens;
    const std::int64_t num_pages = (end_key + kPageTokens - 1) / kPageTokens - first_page;
    for (std::int64_t p = 0; p < std::min<std::int64_t>(kBlockPages + kAheadPages, num_pages); ++p) {
      const std::int64_t page = block.segment->pages[first_page + p];
      k_pages[p] = kv_.keys(page, q_.layer, head);
      v_pages[p] = kv_.keys_by_token() ? k_pages[p] : kv_.values(page, q_.layer, head);
    }
    args.next_k_pages = k_pages + kBlockPages;
    args.k_pages = k_pages;
    args.v_pages = v_pages;
    kernels_.attend_block(args);
    kernels_.merge(out, args.out, args.num_rows, q_.v_dim);
  }
}

void Cached::finish_rows(const RowBlock& block, int head, const Partial& total) {
  for (std::int64_t r = 0; r < block.num_rows; ++r) {
    const std::int64_t row = block.first_row + r, query_head = static_cast<std::int64_t>(head) * q_.group + row % q_.group;
    kernels_.finish(total.acc + r * q_.v_dim, total.sums + r * kPageTokens, total.max[r],
                    q_.sinks != nullptr ? q_.sinks + query_head : nullptr,
                    out_.row(row / q_.group - q_.first_token) + query_head * q_.v_dim, q_.v_dim);
  }
}

// Every item does all runs of its rows.
void Cached::run_whole() {
  const std::int64_t heads = kv_.kv_heads(), items = static_cast<std::int64_t>(blocks_.size()) * heads;
  compute_.pool.parallel_for(items, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t item = begin; item < end; ++item) {
      const RowBlock& block = blocks_[static_cast<std::size_t>(item / heads)];
      const int head = static_cast<int>(item % heads);
      Carver scratch = scratch_of(thread);
      const Partial total = carve_partial(scratch, block.num_rows), part = carve_partial(scratch, block.num_rows);
      clear(total, block.num_rows);
      for (std::int64_t run = block.first_run; run < block.last_run; ++run) {
        attend_run(block, head, run, part, scratch);
        kernels_.merge(total, part, static_cast<int>(block.num_rows), q_.v_dim);
      }
      finish_rows(block, head, total);
    }
  });
}

// Every item does one run of its rows; a second pass merges them.
void Cached::run_split() {
  const std::int64_t heads = kv_.kv_heads();
  const std::size_t slot_bytes = (partial_bytes(max_rows_) + 63) / 64 * 64;
  std::uint8_t* const slots = static_cast<std::uint8_t*>(
      compute_.workspace.allocate(slot_bytes * static_cast<std::size_t>(num_runs_ * heads)));
  const auto part_of = [&](const RowBlock& block, std::int64_t run, std::int64_t head) {
    const std::int64_t slot = (block.partial + run - block.first_run) * heads + head;
    Carver carver{slots + static_cast<std::size_t>(slot) * slot_bytes};
    return carve_partial(carver, block.num_rows);
  };
  compute_.pool.parallel_for(num_runs_ * heads, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t run = item / heads, head = item % heads;
      const RowBlock& block = *std::prev(std::upper_bound(
          blocks_.begin(), blocks_.end(), run, [](std::int64_t value, const RowBlock& b) { return value < b.partial; }));
      const std::int64_t own_run = block.first_run + run - block.partial;
      attend_run(block, static_cast<int>(head), own_run, part_of(block, own_run, head), scratch_of(thread));
    }
  });
  const std::int64_t items = static_cast<std::int64_t>(blocks_.size()) * heads;
  compute_.pool.parallel_for(items, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
    for (std::int64_t item = begin; item < end; ++item) {
      const RowBlock& block = blocks_[static_cast<std::size_t>(item / heads)];
      const std::int64_t head = item % heads;
      Carver scratch = scratch_of(thread);
      const Partial total = carve_partial(scratch, block.num_rows);
      clear(total, block.num_rows);
      for (std::int64_t run = block.first_run; run < block.last_run; ++run)
        kernels_.merge(total, part_of(block, run, head), static_cast<int>(block.num_rows), q_.v_dim);
      finish_rows(block, static_cast<int>(head), total);
    }
  });
}

void Cached::run() {
  const std::int64_t heads = kv_.kv_heads(), wanted = 2 * compute_.pool.threads();
  cut_rows(kMaxRows);
  bool split = static_cast<std::int64_t>(blocks_.size()) * heads < wanted && compute_.pool.threads() > 1;
  if (split) {
    // Fewer rows an item first, as long as the keys they share stay worth it; then runs.
    const std::int64_t rows = std::max<std::int64_t>(8, (q_.num_tokens * q_.group * heads + wanted - 1) / wanted);
    cut_rows(std::min(rows, kMaxRows));
    const std::int64_t bytes = num_runs_ * heads * static_cast<std::int64_t>((partial_bytes(max_rows_) + 63) / 64 * 64);
    split = static_cast<std::int64_t>(blocks_.size()) * heads < wanted &&
            num_runs_ > static_cast<std::int64_t>(blocks_.size()) && bytes <= kMaxSplitBytes;
  }
  const Scratch scratch(compute_.workspace);
  scratch_ = static_cast<std::uint8_t*>(
      compute_.workspace.allocate(scratch_bytes() * static_cast<std::size_t>(compute_.pool.threads())));
  if (split)
    run_split();
  else
    run_whole();
}

}  // namespace

void attend_cached(Compute& compute, const KvPages& kv, const Step& step, const Queries& queries, const Matrix& out) {
  Cached(compute, kv, step, queries, out).run();
}

}  // namespace tidegate

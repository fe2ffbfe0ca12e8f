// The routed experts of one layer. Expert results are written per (token, k) pair and added up at the end in the order
// k = 0..K-1, so the order in which experts arrive, are batched or are computed cannot change a bit.
//
// T tokens, K experts per token, D hidden, F expert width; pair t * K + k is the k-th expert of token t.
#pragma once
#include <cstdint>
#include <vector>

#include "linear.h"
#include "slots.h"

namespace tidegate {

// Where the parts of an expert's blob are; see src/tidegate/quant/layout.py.
struct ExpertLayout {
  std::int64_t hidden_size = 0, expert_dim = 0;
  WeightFormat format, down_format;
  bool has_bias = false;
  std::int64_t up_offset = 0, down_offset = 0, bias_offset = 0;
};

// One layer's step: construct, run() once a placement until every expert was there, finish().
class MoeStep {
 public:
  // `ids` and `weights` are [T, K] and must outlive the step, as x must. Everything is allocated from the workspace; the
  // result comes first, so that finish() can free the rest.
  MoeStep(Compute& compute, const Matrix& x, const std::int32_t* ids, const float* weights, std::int64_t experts_per_token,
          const ExpertLayout& layout, const ActivationParams& activation);

  // Computes these experts: those whose slot is ready first, then whatever becomes ready. Returns -1, or the slot whose
  // load failed; the step cannot be finished then. Experts that no token chose are not waited for.
  int run(const std::vector<int>& experts, const std::vector<int>& slots, SlotSource& source);

  // [T, D]. Throws std::logic_error if some pair's expert was in no placement, or was in two.
  Matrix finish();

 private:
  struct Expert;
  void compute_batch(std::vector<Expert>& batch);
  Tile input_tile(const Expert& expert, std::int64_t t) const;
  std::int64_t block_rows_of(const std::vector<Expert>& batch) const;
  void hidden_block(const Expert& expert, std::int64_t first_row, std::int64_t block_rows) const;
  void down_panels(const Expert& expert, std::int64_t begin, std::int64_t end) const;

  Compute& compute_;
  const Kernels& kernels_;
  const TileShape tile_shape_;  // one for both layers, whose tiles hold the same pairs
  const std::int64_t tokens_, experts_per_token_;
  const float* const weights_;
  const ExpertLayout layout_;
  const ActivationParams activation_;
  const Matrix out_;
  const std::size_t mark_;
  float* const pairs_;                    // [T * K, D]
  const PreparedRows inputs_;             // every token, in tiles of one
  std::vector<std::int32_t> by_expert_;   // pairs sorted by expert, then by token
  std::vector<std::int64_t> starts_;      // where each expert's pairs begin in by_expert_
  std::int64_t pairs_done_ = 0;
};

}  // namespace tidegate

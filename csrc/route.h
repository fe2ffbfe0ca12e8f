// Which experts a token goes to: router logits, and the rules that models have for choosing from them.
#pragma once
#include <cstdint>
#include <vector>

#include "compute.h"

namespace tidegate {

enum class Scoring { softmax, topk_softmax, sigmoid, sparsemixer };

// MoeConfig of model_config.py and the router's weights (borrowed).
struct RouterParams {
  const float* weight = nullptr;      // [num_experts][hidden]
  const float* bias = nullptr;        // [num_experts] or null, added to the logits
  const float* correction = nullptr;  // [num_experts] or null, added to the scores for choosing only
  std::int64_t hidden = 0;
  int num_experts = 0, top_k = 0;
  Scoring scoring = Scoring::softmax;
  bool normalize = false;
  double scaling = 1.0;
  int num_groups = 1, topk_groups = 1;
  int group_best = 1;  // a group's score is the sum of its best 1 or 2 experts
  double jitter = 0.0;
};

// Throws std::invalid_argument if fewer than top_k experts can ever be chosen.
void check_router(const RouterParams& router);

// x [T, hidden] -> ids and weights [T][top_k], in the order of choice: best score first, ties towards the lower id. Logits
// are float32 (one order of sums), everything after is float64. `said` [num_experts] or null: the mean of the rows' logits.
void route(Compute& compute, const Matrix& x, const RouterParams& router, std::int32_t* ids, float* weights,
           float* said = nullptr);

// For each row of scores [T, E] the `most` best experts, best first, ties towards the lower id, and how far each is above the
// edge: the middle between the last of top_k and the first after it. In standard deviations of the row, at most kLargestMargin
// either way, in steps of 1/256, so that a float16 holds it. 1 <= top_k <= most <= E.
struct Ranking {
  std::vector<std::vector<std::int32_t>> experts;
  std::vector<std::vector<float>> margins;
};
inline constexpr double kLargestMargin = 8.0;
Ranking rank(const Matrix& scores, int top_k, int most);
// The same of one row, into `order` and `margins` [most].
void rank_row(const float* row, int num_experts, int top_k, int most, std::int32_t* order, float* margins);

// The mean of the rows, into `out` [cols].
void mean_row(const Matrix& rows, float* out);

}  // namespace tidegate

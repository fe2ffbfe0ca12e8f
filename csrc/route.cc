#include "route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "float_kernels.h"

namespace tidegate {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kTokenBlock = 64, kExpertBlock = 16;

// Turns n numbers into e^x / sum e^x; -infinity becomes 0.
void softmax(double* x, int n) {
  const double highest = *std::max_element(x, x + n);
  double sum = 0.0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - highest);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

int best_of(const double* x, int n) { return static_cast<int>(std::max_element(x, x + n) - x); }

// One token's choice. Buffers are of num_experts numbers.
class Chooser {
 public:
  explicit Chooser(const RouterParams& router)
      : r_(router), scores_(static_cast<std::size_t>(router.num_experts)), choice_(scores_.size()),
        group_scores_(static_cast<std::size_t>(router.num_groups)) {}

  void choose(const float* logits, std::int32_t* ids, float* weights) {
    std::copy_n(logits, r_.num_experts, scores_.data());
    if (r_.scoring == Scoring::sparsemixer)
      sparsemixer(logits, ids, weights);
    else
      best_scores(ids, weights);
  }

 private:
  void best_scores(std::int32_t* ids, float* weights) {
    if (r_.scoring == Scoring::softmax) softmax(scores_.data(), r_.num_experts);
    if (r_.scoring == Scoring::sigmoid)
      for (double& s : scores_) s = 1.0 / (1.0 + std::exp(-s));
    for (std::size_t e = 0; e < scores_.size(); ++e) choice_[e] = scores_[e] + (r_.correction ? r_.correction[e] : 0.0);
    if (r_.num_groups > 1) close_worse_groups();
    std::vector<double>& chosen = chosen_;
    chosen.resize(static_cast<std::size_t>(r_.top_k));
    for (int k = 0; k < r_.top_k; ++k) {
      const int best = best_of(choice_.data(), r_.num_experts);
      ids[k] = best;
      chosen[static_cast<std::size_t>(k)] = scores_[static_cast<std::size_t>(best)];
      choice_[static_cast<std::size_t>(best)] = kNever;
    }
    if (r_.scoring == Scoring::topk_softmax) softmax(chosen.data(), r_.top_k);
    double sum = 0.0;
    for (double w : chosen) sum += w;
    for (int k = 0; k < r_.top_k; ++k) {
      double w = chosen[static_cast<std::size_t>(k)];
      if (r_.normalize) w /= sum + 1e-20;
      weights[k] = static_cast<float>(w * r_.scaling);
    }
  }

  void close_worse_groups() {
    const int size = r_.num_experts / r_.num_groups;
    for (int g = 0; g < r_.num_groups; ++g) {
      const double* const group = choice_.data() + g * size;
      const int best = best_of(group, size);
      double score = group[best];
      if (r_.group_best == 2) {
        double second = kNever;
        for (int e = 0; e < size; ++e)
          if (e != best) second = std::max(second, group[e]);
        score += second;
      }
      group_scores_[static_cast<std::size_t>(g)] = score;
    }
    // The best groups are marked by an impossible score, the others closed.
    for (int i = 0; i < r_.topk_groups; ++i)
      group_scores_[static_cast<std::size_t>(best_of(group_scores_.data(), r_.num_groups))] = kNever;
    for (int g = 0; g < r_.num_groups; ++g)
      if (group_scores_[static_cast<std::size_t>(g)] != kNever) std::fill_n(choice_.begin() + g * size, size, kNever);
  }

  // PhiMoE (Liu et al. 2024), inference: the best expert, then the best of the rest, each weighted by a softmax over the
  // experts whose logit is within a relative 2 * jitter of it.
  void sparsemixer(const float* logits, std::int32_t* ids, float* weights) {
    for (int k = 0; k < r_.top_k; ++k) {
      const int best = best_of(scores_.data(), r_.num_experts);
      const double top = scores_[static_cast<std::size_t>(best)];
      for (std::size_t e = 0; e < scores_.size(); ++e) {
        const double logit = static_cast<double>(logits[e]);
        const bool far = (top - logit) / std::max(std::abs(logit), top) > 2 * r_.jitter;
        choice_[e] = far ? kNever : scores_[e];
      }
      softmax(choice_.data(), r_.num_experts);
      ids[k] = best;
      weights[k] = static_cast<float>(choice_[static_cast<std::size_t>(best)]);
      scores_[static_cast<std::size_t>(best)] = kNever;
    }
  }

  const RouterParams& r_;
  std::vector<double> scores_, choice_, group_scores_, chosen_;
};

}  // namespace

void check_router(const RouterParams& r) {
  const bool groups_good = r.num_groups >= 1 && r.num_experts % r.num_groups == 0 && r.topk_groups >= 1 &&
                           r.topk_groups <= r.num_groups && r.group_best <= r.num_experts / r.num_groups;
  if (!groups_good) throw std::invalid_argument("router: experts are not whole groups");
  const int open = r.num_groups > 1 ? r.num_experts / r.num_groups * r.topk_groups : r.num_experts;
  if (r.top_k < 1 || r.top_k > open || (r.scoring == Scoring::sparsemixer && r.top_k != 2))
    throw std::invalid_argument("router: cannot choose " + std::to_string(r.top_k) + " of " + std::to_string(open) + " experts");
}

void route(Compute& compute, const Matrix& x, const RouterParams& router, std::int32_t* ids, float* weights, float* said) {
  if (x.cols != router.hidden) throw std::invalid_argument("router: hidden states have another width");
  const Scratch scratch(compute.workspace);
  const Matrix logits = compute.workspace.matrix(x.rows, router.num_experts);
  const FloatKernels& kernels = float_kernels(compute.isa);
  const std::int64_t expert_blocks = (router.num_experts + kExpertBlock - 1) / kExpertBlock;
  const std::int64_t token_blocks = (x.rows + kTokenBlock - 1) / kTokenBlock;
  compute.pool.parallel_for(expert_blocks * token_blocks, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t t = item / expert_blocks * kTokenBlock, e = item % expert_blocks * kExpertBlock;
      const std::int64_t tokens = std::min(kTokenBlock, x.rows - t), experts = std::min(kExpertBlock, router.num_experts - e);
      kernels.dots(x.row(t), tokens, router.weight + e * router.hidden, experts, router.hidden, logits.row(t) + e, logits.cols);
    }
  });
  compute.pool.parallel_for(x.rows, 32, [&](std::int64_t begin, std::int64_t end, int) {
    Chooser chooser(router);
    for (std::int64_t t = begin; t < end; ++t) {
      if (router.bias != nullptr)
        for (int e = 0; e < router.num_experts; ++e) logits.row(t)[e] += router.bias[e];
      chooser.choose(logits.row(t), ids + t * router.top_k, weights + t * router.top_k);
    }
  });
  if (said != nullptr) mean_row(logits, said);
}

void rank_row(const float* row, int num_experts, int top_k, int most, std::int32_t* order, float* margins) {
  // The best so far are kept in order: most numbers are below the last of them, and among equals the earlier stays ahead.
  int count = 0;
  for (int e = 0; e < num_experts; ++e) {
    if (count == most && !(row[e] > row[order[most - 1]])) continue;
    int place = count < most ? count++ : most - 1;
    for (; place > 0 && row[e] > row[order[place - 1]]; --place) order[place] = order[place - 1];
    order[place] = e;
  }
  constexpr int kLanes = 4;
  double sums[kLanes] = {}, squares[kLanes] = {};
  for (int e = 0; e < num_experts; ++e) sums[e % kLanes] += row[e];
  const double mean = (sums[0] + sums[1] + sums[2] + sums[3]) / num_experts;
  for (int e = 0; e < num_experts; ++e) squares[e % kLanes] += (row[e] - mean) * (row[e] - mean);
  const double deviation = std::sqrt((squares[0] + squares[1] + squares[2] + squares[3]) / num_experts) + 1e-30;
  const auto score = [&](int place) { return static_cast<double>(row[order[place]]); };
  const double edge = 0.5 * (score(top_k - 1) + score(std::min(top_k, most - 1)));
  for (int place = 0; place < most; ++place) {
    const double margin = std::clamp((score(place) - edge) / deviation, -kLargestMargin, kLargestMargin);
    margins[place] = static_cast<float>(std::nearbyint(256.0 * margin) / 256.0);
  }
}

Ranking rank(const Matrix& scores, int top_k, int most) {
  if (top_k < 1 || top_k > most || most > scores.cols) throw std::invalid_argument("rank: 1 <= top_k <= most <= experts");
  Ranking out;
  std::vector<std::int32_t> order(static_cast<std::size_t>(most));
  std::vector<float> margins(static_cast<std::size_t>(most));
  for (std::int64_t t = 0; t < scores.rows; ++t) {
    rank_row(scores.row(t), static_cast<int>(scores.cols), top_k, most, order.data(), margins.data());
    out.experts.emplace_back(order.begin(), order.begin() + most);
    out.margins.push_back(margins);
  }
  return out;
}

void mean_row(const Matrix& rows, float* out) {
  if (rows.rows == 1) {
    std::copy_n(rows.data, rows.cols, out);
    return;
  }
  std::fill_n(out, rows.cols, 0.0f);
  for (std::int64_t t = 0; t < rows.rows; ++t)
    for (std::int64_t c = 0; c < rows.cols; ++c) out[c] += rows.row(t)[c];
  for (std::int64_t c = 0; c < rows.cols; ++c) out[c] /= static_cast<float>(rows.rows);
}

}  // namespace tidegate

#include "gate.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tidegate {
namespace {

constexpr std::int64_t kToldBefore = 4, kMostTold = 16;

Odds::Worthy weigh(Odds& odds, Gate& gate, const Matrix& x, int layer, Distance distance, const LayerBook& here) {
  gate.look(x);
  return odds.weigh(layer, distance, gate.experts(), gate.margins(), gate.most(), here, gate.top_k());
}

}  // namespace

Gate::Gate(Compute& compute, const PackedMatrix& weight, float* bias, std::optional<NormWeights> norm, int top_k, int most)
    : compute_(compute), weight_(weight), bias_(bias), norm_(norm), top_k_(top_k), most_(most),
      said_(static_cast<std::size_t>(weight.n)), told_(kToldBefore), order_(said_.size()),
      margins_(static_cast<std::size_t>(most)) {
  if (weight.bias != bias) throw std::invalid_argument("gate: the bias is not the weight's");
  if (top_k < 1 || top_k > most || most > weight.n) throw std::invalid_argument("gate: 1 <= top_k <= most <= experts");
}

Matrix Gate::scores(const Matrix& x) {
  const Matrix out = linear(compute_, norm_ ? norm(compute_, x, *norm_) : x, weight_);
  mean_row(out, said_.data());
  rows_ = out.rows;
  return out;
}

Ranking Gate::guess(const Matrix& x) {
  const Scratch scratch(compute_.workspace);
  return rank(scores(x), top_k_, most_);
}

void Gate::look(const Matrix& x) {
  if (x.rows != 1) throw std::invalid_argument("gate: one row is looked at");
  const Scratch scratch(compute_.workspace);
  rank_row(scores(x).data, static_cast<int>(weight_.n), top_k_, most_, order_.data(), margins_.data());
}

void Gate::follow(const float* heard) {
  double share = 1.0 / static_cast<double>(std::min(told_, kMostTold));
  if (rows_ != 1) share = 1.0 - std::pow(1.0 - share, static_cast<double>(rows_));
  told_ += rows_;
  for (std::size_t e = 0; e < said_.size(); ++e) bias_[e] += static_cast<float>(share) * (heard[e] - said_[e]);
}

Odds::Worthy Sight::at_start(const Matrix& x) const {
  return start == nullptr ? Odds::Worthy{} : weigh(*odds, *start, x, layer, kAtStart, *here);
}

Odds::Worthy Sight::after_route(const Matrix& x, const std::vector<int>& needed, const float* heard) const {
  odds->learn(layer, needed);
  if (start != nullptr) start->follow(heard);
  if (before != nullptr) before->follow(heard);
  return next == nullptr ? Odds::Worthy{} : weigh(*odds, *next, x, layer + 1, kAhead, *there);
}

}  // namespace tidegate

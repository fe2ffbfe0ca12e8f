#include "gate.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "clock.h"

namespace tidegate {
namespace {

constexpr std::int64_t kToldBefore = 4, kMostTold = 16;

}  // namespace

Gate::Gate(Compute& compute, const PackedMatrix& weight, float* bias, std::optional<NormWeights> norm, int top_k, int most)
    : compute_(compute), weight_(weight), bias_(bias), norm_(norm), top_k_(top_k), most_(most),
      said_(static_cast<std::size_t>(weight.n)), told_(kToldBefore), order_(static_cast<std::size_t>(most)),
      margins_(order_.size()) {
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

void Sight::at_start(const Matrix& x) const {
  if (start == nullptr) return;
  const std::int64_t start_ns = now_ns();
  look(*start, x, layer, kAtStart, *here);
  here->counts().guess_ns += now_ns() - start_ns;
}

void Sight::after_route(const Matrix& x, const std::vector<int>& needed, const float* heard) const {
  odds->learn(layer, needed);
  if (start != nullptr) start->follow(heard);
  if (before != nullptr) before->follow(heard);
  if (next != nullptr) look(*next, x, layer + 1, kAhead, *there);
}

void Sight::look(Gate& gate, const Matrix& x, int at, Distance distance, LayerCache& cache) const {
  gate.look(x);
  const Odds::Worthy found = odds->weigh(at, distance, gate.experts(), gate.margins(), gate.most(), cache.book(), gate.top_k());
  cache.counts().prefetch_dropped += found.num_dropped;
  for (const auto& [expert, worth] : found.loads)
    if (cache.prefetch(expert, worth, gate.experts(), gate.top_k())) odds->loaded(at, expert);
}

}  // namespace tidegate

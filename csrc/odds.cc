#include "odds.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tidegate {
namespace {

constexpr double kMostCertain = 30.0;

}  // namespace

Odds::Odds(int num_layers, int num_experts, std::vector<Curve> curves, double half_life, double least_heat,
           double learning_rate)
    : curves_(std::move(curves)), uses_(static_cast<std::size_t>(num_layers), DecayedUses(num_experts, half_life)),
      guesses_(uses_.size()), least_heat_(least_heat), learning_rate_(learning_rate) {}

Odds::Worthy Odds::weigh(int layer, int distance, const std::vector<int>& ranked, const std::vector<float>& margins,
                         const std::uint8_t* is_here, int per_token, double threshold) {
  if (margins.size() < ranked.size()) throw std::invalid_argument("a guess wants a margin for every expert");
  const auto [a, b, c] = curves_.at(static_cast<std::size_t>(distance));
  const DecayedUses& uses = uses_.at(static_cast<std::size_t>(layer));
  Worthy out;
  for (std::size_t rank = 0; rank < ranked.size(); ++rank) {
    const int expert = ranked[rank];
    const double value = uses.value(expert);
    if (is_here[expert]) continue;
    const double margin = static_cast<double>(margins[rank]), log_heat = std::log(value + least_heat_);
    const double odds = 1.0 / (1.0 + std::exp(-std::clamp(a * margin + b * log_heat + c, -kMostCertain, kMostCertain)));
    guesses_[static_cast<std::size_t>(layer)].push_back({expert, distance, margin, log_heat, odds});
    if (odds >= threshold)
      out.loads.emplace_back(expert, odds);
    else if (static_cast<int>(rank) < per_token)
      ++out.num_dropped;
  }
  return out;
}

void Odds::learn(int layer, const std::vector<int>& needed) {
  std::vector<Guess>& guesses = guesses_.at(static_cast<std::size_t>(layer));
  for (const Guess& guess : guesses) {
    const bool is_right = std::find(needed.begin(), needed.end(), guess.expert) != needed.end();
    const double step = ((is_right ? 1.0 : 0.0) - guess.odds) * learning_rate_;
    Curve& curve = curves_[static_cast<std::size_t>(guess.distance)];
    curve[0] += step * guess.margin;
    curve[1] += step * guess.log_heat;
    curve[2] += step;
  }
  guesses.clear();
  uses_[static_cast<std::size_t>(layer)].use(needed);
}

void Odds::forget() {
  for (std::vector<Guess>& guesses : guesses_) guesses.clear();
}

}  // namespace tidegate

#include "odds.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tidegate {
namespace {

constexpr double kMostCertain = 30.0;
constexpr double kHaste = 3.0, kHastyLoads = 64.0;  // the first loads move the floor four times as far, and then less and less

bool contains(const std::vector<int>& experts, int expert) {
  return std::find(experts.begin(), experts.end(), expert) != experts.end();
}

}  // namespace

Odds::Odds(int num_layers, int num_experts, std::vector<Curve> curves, double half_life, double least_heat,
           double learning_rate, const Demands& demands)
    : demands(demands), curves_(std::move(curves)),
      uses_(static_cast<std::size_t>(num_layers), Uses(Worth::decayed_uses, num_experts, half_life)), guesses_(uses_.size()),
      loads_(uses_.size()), least_heat_(least_heat), learning_rate_(learning_rate) {}

double Odds::threshold(int distance) const {
  const double least = std::max(demands.floor, demands.bar), early = demands.early;
  return distance == kAhead ? least * early / (1.0 + (early - 1.0) * least) : least;
}

Odds::Worthy Odds::weigh(int layer, int distance, const std::int32_t* ranked, const float* margins, int count,
                         const LayerBook& here, int per_token) {
  const auto [a, b, c] = curves_.at(static_cast<std::size_t>(distance));
  const Uses& uses = uses_.at(static_cast<std::size_t>(layer));
  const double least = threshold(distance);
  Worthy out;
  ++num_guesses;
  for (int rank = 0; rank < count; ++rank) {
    const int expert = ranked[rank];
    if (here.is_here(expert)) continue;
    ++num_missing;
    const double margin = static_cast<double>(margins[rank]), log_heat = std::log(uses.value(expert) + least_heat_);
    const double odds = 1.0 / (1.0 + std::exp(-std::clamp(a * margin + b * log_heat + c, -kMostCertain, kMostCertain)));
    guesses_[static_cast<std::size_t>(layer)].push_back({expert, distance, margin, log_heat, odds});
    if (odds >= least)
      out.loads.emplace_back(expert, odds);
    else if (rank < per_token)
      ++out.num_dropped;
  }
  num_worthy += static_cast<std::int64_t>(out.loads.size());
  return out;
}

void Odds::learn(int layer, const std::vector<int>& needed) {
  std::vector<Guess>& guesses = guesses_.at(static_cast<std::size_t>(layer));
  for (const Guess& guess : guesses) {
    const double step = ((contains(needed, guess.expert) ? 1.0 : 0.0) - guess.odds) * learning_rate_;
    Curve& curve = curves_[static_cast<std::size_t>(guess.distance)];
    curve[0] += step * guess.margin;
    curve[1] += step * guess.log_heat;
    curve[2] += step;
  }
  guesses.clear();
  std::vector<int>& loads = loads_[static_cast<std::size_t>(layer)];
  for (const int expert : loads) {
    const double pace = 1.0 + kHaste * std::max(0.0, 1.0 - static_cast<double>(num_judged_++) / kHastyLoads);
    demands.floor = contains(needed, expert) ? std::max(0.0, demands.floor - pace * demands.fall)
                                             : std::min(1.0, demands.floor + pace * demands.rise);
  }
  loads.clear();
  uses_[static_cast<std::size_t>(layer)].use(needed);
}

void Odds::forget() {
  for (std::vector<Guess>& guesses : guesses_) guesses.clear();
  for (std::vector<int>& loads : loads_) loads.clear();
}

}  // namespace tidegate

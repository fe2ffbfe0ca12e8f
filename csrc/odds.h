// What guesses at the experts of a layer to come are worth. See src/tidegate/experts/lookahead.py, which decides by it.
#pragma once
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "layer_cache.h"
#include "uses.h"

namespace tidegate {

// Factors of a guess's margin and of log(decayed uses + least_heat), and a constant: their sum is the logarithm of the odds.
using Curve = std::array<double, 3>;

// Guesses are made at the layer's own start, or where the layer before was routed.
enum Distance : int { kAtStart = 0, kAhead = 1 };

// The threshold is `bar` or `floor`, whichever is higher; every load that was wrong lifts the floor, every right one lowers it,
// the first ones more.
// An earlier guess wants odds that are `early` times as good.
struct Demands {
  double floor = 0.0, rise = 0.0, fall = 0.0, early = 1.0, bar = 0.0;
};

// A curve for each distance that guesses are made at; each follows, by logistic regression, the guesses at experts that were not
// in memory. Throws std::out_of_range for a layer, distance or expert that is none.
class Odds {
 public:
  Odds(int num_layers, int num_experts, std::vector<Curve> curves, double half_life, double least_heat, double learning_rate,
       const Demands& demands);

  Demands demands;
  // So far; how many experts they named that were not here; and how many of those were worth a load.
  std::int64_t num_guesses = 0, num_missing = 0, num_worthy = 0;

  struct Worthy {
    std::vector<std::pair<int, double>> loads;  // experts and their odds, best guess first
    int num_dropped = 0;
  };
  // A guess: `count` experts, best first, with a margin each. Those that are not here and have good odds; and how many of the
  // first `per_token` are not here and have worse. Kept until `learn` or `forget`.
  Worthy weigh(int layer, int distance, const std::int32_t* ranked, const float* margins, int count, const LayerBook& here,
               int per_token);
  // A guess has started this load.
  void loaded(int layer, int expert) { loads_.at(static_cast<std::size_t>(layer)).push_back(expert); }
  // What the layer really needs: curves, floor and decayed uses follow.
  void learn(int layer, const std::vector<int>& needed);
  // Nothing will be learned from guesses so far.
  void forget();

  double threshold(int distance) const;

 private:
  struct Guess {
    int expert, distance;
    double margin, log_heat, odds;
  };
  std::vector<Curve> curves_;
  std::vector<Uses> uses_;            // by layer, as the next two
  std::vector<std::vector<Guess>> guesses_;
  std::vector<std::vector<int>> loads_;
  double least_heat_, learning_rate_;
  std::int64_t num_judged_ = 0;  // loads
};

}  // namespace tidegate

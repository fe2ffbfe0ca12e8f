// What guesses at the experts of a layer to come are worth. See src/tidegate/experts/lookahead.py, which decides by it.
#pragma once
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "decayed_uses.h"

namespace tidegate {

// Factors of a guess's margin and of log(decayed uses + least_heat), and a constant: their sum is the logarithm of the odds.
using Curve = std::array<double, 3>;

// A curve for each distance that guesses are made at; each follows, by logistic regression, the guesses at experts that were not
// in memory. Throws std::out_of_range for a layer, distance or expert that is none.
class Odds {
 public:
  Odds(int num_layers, int num_experts, std::vector<Curve> curves, double half_life, double least_heat, double learning_rate);

  struct Worthy {
    std::vector<std::pair<int, double>> loads;  // experts and their odds, best guess first
    int num_dropped = 0;
  };
  // A guess: `ranked` experts, best first, with a margin each. Those that are not here (is_here[expert] == 0) and have odds of
  // at least `threshold`; and how many of the first `per_token` are not here and have less. Kept until `learn` or `forget`.
  Worthy weigh(int layer, int distance, const std::vector<int>& ranked, const std::vector<float>& margins,
               const std::uint8_t* is_here, int per_token, double threshold);
  // What the layer really needs: curves and decayed uses follow.
  void learn(int layer, const std::vector<int>& needed);
  // Nothing will be learned from guesses so far.
  void forget();

 private:
  struct Guess {
    int expert, distance;
    double margin, log_heat, odds;
  };
  std::vector<Curve> curves_;
  std::vector<DecayedUses> uses_;          // by layer
  std::vector<std::vector<Guess>> guesses_;  // by layer
  double least_heat_, learning_rate_;
};

}  // namespace tidegate

// How often experts of each rank were used, by layer: what experts/shares.py deals slots by.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tidegate {

// Throws std::out_of_range for a layer that is none.
class RankCounts {
 public:
  // One use of a layer in `sample_every` is looked at.
  RankCounts(int num_layers, int num_experts, int sample_every)
      : counts_(static_cast<std::size_t>(num_layers), std::vector<double>(static_cast<std::size_t>(num_experts))),
        offered_(counts_.size()), sample_every_(sample_every) {}

  // Whether the coming use of the layer is one to look at.
  bool wants(int layer) { return ++offered_.at(static_cast<std::size_t>(layer)) % sample_every_ == 0; }
  // Ranks of one token batch's experts; those beyond the experts are of ones that were never used.
  void observe(int layer, const std::vector<int>& ranks) {
    std::vector<double>& counts = counts_.at(static_cast<std::size_t>(layer));
    for (const int rank : ranks)
      if (rank >= 0 && static_cast<std::size_t>(rank) < counts.size()) ++counts[static_cast<std::size_t>(rank)];
    most_needed_ = std::max(most_needed_, static_cast<int>(ranks.size()));
    if (layer == 0) ++looks_;
  }
  void fade(double factor) {
    for (std::vector<double>& counts : counts_)
      for (double& count : counts) count *= factor;
    looks_ = 0;
  }

  const std::vector<std::vector<double>>& counts() const { return counts_; }
  int most_needed() const { return most_needed_; }
  int looks() const { return looks_; }  // at the first layer, since fade()

 private:
  std::vector<std::vector<double>> counts_;
  std::vector<std::int64_t> offered_;
  const int sample_every_;
  int most_needed_ = 1, looks_ = 0;
};

}  // namespace tidegate

#include "decayed_uses.h"

#include <algorithm>
#include <cmath>

namespace tidegate {
namespace {

const double kRescaleAbove = std::ldexp(1.0, 512);

}  // namespace

DecayedUses::DecayedUses(int num_experts, double half_life)
    : heat_(static_cast<std::size_t>(num_experts)), last_use_(heat_.size(), -1), resident_(heat_.size()),
      growth_(std::exp2(1.0 / half_life)) {}

void DecayedUses::use(const std::vector<int>& experts) {
  weight_ *= growth_;
  if (weight_ > kRescaleAbove) {
    for (double& heat : heat_) heat /= weight_;
    weight_ = 1.0;
  }
  ++now_;
  for (int expert : experts) {
    last_use_.at(static_cast<std::size_t>(expert)) = now_;
    heat_[static_cast<std::size_t>(expert)] += weight_;
  }
}

int DecayedUses::lowest(const std::vector<int>& kept) const {
  return lowest_unless([&](int expert) { return std::find(kept.begin(), kept.end(), expert) != kept.end(); });
}

std::vector<int> DecayedUses::ranks(const std::vector<int>& experts) const {
  std::vector<int> out;
  for (int expert : experts) {
    const double heat = heat_.at(static_cast<std::size_t>(expert));
    const bool is_new = last_use_[static_cast<std::size_t>(expert)] < 0;
    out.push_back(static_cast<int>(
        is_new ? heat_.size() : std::count_if(heat_.begin(), heat_.end(), [heat](double other) { return other > heat; })));
  }
  return out;
}

}  // namespace tidegate

#include "uses.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tidegate {
namespace {

const double kRescaleAbove = std::ldexp(1.0, 512);

}  // namespace

Uses::Uses(Worth worth, int num_experts, double half_life)
    : worth_(worth), counts_(static_cast<std::size_t>(num_experts)), last_use_(counts_.size(), -1), resident_(counts_.size()),
      growth_(worth == Worth::decayed_uses ? std::exp2(1.0 / half_life) : 1.0) {}

int Uses::check(int expert) const {
  if (expert < 0 || static_cast<std::size_t>(expert) >= counts_.size()) throw std::out_of_range("no such expert");
  return expert;
}

void Uses::use(const std::vector<int>& experts) {
  weight_ *= growth_;
  if (weight_ > kRescaleAbove) {
    for (double& count : counts_) count /= weight_;
    weight_ = 1.0;
  }
  ++now_;
  for (const int expert : experts) {
    last_use_[static_cast<std::size_t>(check(expert))] = now_;
    counts_[static_cast<std::size_t>(expert)] += weight_;
  }
}

int Uses::lowest(const std::vector<int>& kept) const {
  return lowest_unless([&](int expert) { return std::find(kept.begin(), kept.end(), expert) != kept.end(); });
}

std::vector<int> Uses::ranks(const std::vector<int>& experts) const {
  std::vector<double> scores;
  for (std::size_t e = 0; e < counts_.size(); ++e) scores.push_back(score_of(e));
  std::vector<int> out;
  for (const int expert : experts) {
    const auto e = static_cast<std::size_t>(check(expert));
    const double score = scores[e];
    out.push_back(static_cast<int>(last_use_[e] < 0 ? static_cast<std::ptrdiff_t>(scores.size())
                                                    : std::count_if(scores.begin(), scores.end(), [score](double other) { return other > score; })));
  }
  return out;
}

}  // namespace tidegate

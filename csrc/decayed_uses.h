// How much the experts of one layer were used of late: each use counts 2 ** (-age / half_life), its age in steps of the layer.
#pragma once
#include <cstdint>
#include <vector>

namespace tidegate {

// Instead of fading every count at every step, a new use weighs 2 ** (now / half_life), which orders the experts the same; all
// counts are scaled back before they overflow. Throws std::out_of_range for an expert that is none.
class DecayedUses {
 public:
  DecayedUses(int num_experts, double half_life);

  // The experts of one step, all at once.
  void use(const std::vector<int>& experts);
  double value(int expert) const { return heat_.at(static_cast<std::size_t>(expert)) / weight_; }

  // Whether the expert is a candidate of `lowest`; none is at first.
  void set_resident(int expert, bool is_resident) { resident_.at(static_cast<std::size_t>(expert)) = is_resident; }
  // The resident expert of lowest value that is not in `kept`, -1 if there is none. Ties go to the one that was used longest ago,
  // then to the lower id.
  int lowest(const std::vector<int>& kept) const;
  // The same, `kept` being a function of an expert.
  template <class Kept>
  int lowest_unless(const Kept& is_kept) const {
    int lowest = -1;
    for (std::size_t e = 0; e < heat_.size(); ++e) {
      if (!resident_[e]) continue;
      const auto best = static_cast<std::size_t>(lowest);
      if (lowest >= 0 && (heat_[e] > heat_[best] || (heat_[e] == heat_[best] && last_use_[e] >= last_use_[best]))) continue;
      if (!is_kept(static_cast<int>(e))) lowest = static_cast<int>(e);
    }
    return lowest;
  }
  // For each how many experts are worth more; the number of experts for one that was never used.
  std::vector<int> ranks(const std::vector<int>& experts) const;

 private:
  std::vector<double> heat_;
  std::vector<std::int64_t> last_use_;
  std::vector<std::uint8_t> resident_;
  std::int64_t now_ = 0;
  double weight_ = 1.0, growth_;
};

}  // namespace tidegate

// How much the experts of one layer were used, as replacement policies see it. Time is counted in steps of the layer.
#pragma once
#include <cstdint>
#include <vector>

namespace tidegate {

// What makes an expert worth its slot.
enum class Worth {
  decayed_uses,   // each use counts 2 ** (-age / half_life)
  last_use,       // when that was
  uses,           // how many
  uses_over_age,  // over steps since the last one
};

// Counts of every expert, whether it has a slot or not. Throws std::out_of_range for an expert that is none.
class Uses {
 public:
  // `half_life` is that of decayed_uses.
  Uses(Worth worth, int num_experts, double half_life);

  // The experts of one step, all at once.
  void use(const std::vector<int>& experts);
  double value(int expert) const {
    const double score = score_of(static_cast<std::size_t>(check(expert)));
    return worth_ == Worth::decayed_uses ? score / weight_ : score;
  }

  // Whether the expert is a candidate of `lowest`; none is at first.
  void set_resident(int expert, bool is_resident) { resident_[static_cast<std::size_t>(check(expert))] = is_resident; }
  // The resident expert of lowest value that is not in `kept`, -1 if there is none. Ties go to the one that was used longest ago,
  // then to the lower id.
  int lowest(const std::vector<int>& kept) const;
  // The same, `is_kept` being a function of an expert.
  template <class Kept>
  int lowest_unless(const Kept& is_kept) const {
    int lowest = -1;
    double least = 0.0;
    for (std::size_t e = 0; e < resident_.size(); ++e) {
      if (!resident_[e]) continue;
      const double score = score_of(e);
      if (lowest >= 0 && (score > least || (score == least && last_use_[e] >= last_use_[static_cast<std::size_t>(lowest)]))) continue;
      if (is_kept(static_cast<int>(e))) continue;
      lowest = static_cast<int>(e);
      least = score;
    }
    return lowest;
  }
  // For each how many experts are worth more; the number of experts for one that was never used.
  std::vector<int> ranks(const std::vector<int>& experts) const;

 private:
  int check(int expert) const;
  // In the order of values. Instead of fading every count at every step, a new use weighs 2 ** (now / half_life), which orders the
  // experts the same; all counts are scaled back before they overflow.
  double score_of(std::size_t e) const {
    switch (worth_) {
      case Worth::last_use: return static_cast<double>(last_use_[e]);
      case Worth::uses_over_age: return counts_[e] / static_cast<double>(now_ - last_use_[e] + 1);
      case Worth::uses:
      case Worth::decayed_uses: break;
    }
    return counts_[e];
  }

  const Worth worth_;
  std::vector<double> counts_;
  std::vector<std::int64_t> last_use_;
  std::vector<std::uint8_t> resident_;
  std::int64_t now_ = 0;
  double weight_ = 1.0, growth_;
};

}  // namespace tidegate

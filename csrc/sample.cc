#include "sample.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace tidegate {
namespace {

// Behind a first weight of 1, a weight below 2^-54 changes no running sum in float64, so it can never be drawn.
const double kNegligible = -54.0 * std::log(2.0);

struct Candidate {
  double value;  // (logit - largest) / temperature
  std::int32_t token;
};

bool better(const Candidate& a, const Candidate& b) {
  return a.value != b.value ? a.value > b.value : a.token < b.token;
}

// Puts the best candidates of [from, end) into [from, to), in any order.
void put_best_first(std::vector<Candidate>& all, std::size_t from, std::size_t to) {
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(from), middle = all.begin() + static_cast<std::ptrdiff_t>(to);
  if (to >= all.size()) return;
  if ((to - from) * 64 < all.size())
    std::partial_sort(begin, middle, all.end(), better);  // a heap of few, which hardly any of the others enters
  else
    std::nth_element(begin, middle, all.end(), better);
}

// Candidates of which a growing prefix is in order, best first.
class Ranking {
 public:
  explicit Ranking(std::vector<Candidate>& candidates) : all_(candidates) {}

  std::size_t size() const { return all_.size(); }
  const Candidate& operator[](std::size_t i) {
    if (i >= sorted_) {
      const std::size_t wanted = std::min(all_.size(), std::max<std::size_t>(64, 8 * sorted_));
      put_best_first(all_, sorted_, wanted);
      std::sort(all_.begin() + static_cast<std::ptrdiff_t>(sorted_), all_.begin() + static_cast<std::ptrdiff_t>(wanted), better);
      sorted_ = wanted;
    }
    return all_[i];
  }

 private:
  std::vector<Candidate>& all_;
  std::size_t sorted_ = 0;
};

void require_tokens(const std::int32_t* tokens, std::int64_t count, std::int64_t vocabulary) {
  for (std::int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= vocabulary) throw std::out_of_range("token " + std::to_string(tokens[i]) + " of a penalty");
}

void penalize(std::vector<double>& x, const Penalties& p) {
  const auto vocabulary = static_cast<std::int64_t>(x.size());
  if (p.repetition != 1.0) {
    require_tokens(p.seen, p.num_seen, vocabulary);
    std::vector<bool> done(x.size());
    for (std::int64_t i = 0; i < p.num_seen; ++i) {
      const auto token = static_cast<std::size_t>(p.seen[i]);
      if (done[token]) continue;
      done[token] = true;
      x[token] = x[token] > 0 ? x[token] / p.repetition : x[token] * p.repetition;
    }
  }
  require_tokens(p.counted, p.num_counted, vocabulary);
  for (std::int64_t i = 0; i < p.num_counted; ++i) x[static_cast<std::size_t>(p.counted[i])] -= p.presence + p.frequency * p.counts[i];
}

std::int32_t draw(std::vector<Candidate>& candidates, const SampleParams& params) {
  Ranking ranking(candidates);
  const auto weight = [&](std::size_t i) { return std::exp(ranking[i].value); };
  // How many of the best stay, and their summed weight.
  std::size_t kept = candidates.size();
  double sum = 0.0;
  if (params.top_p < 1.0 || params.min_p <= 0.0)
    for (const Candidate& c : candidates) sum += std::exp(c.value);
  if (params.top_p < 1.0) {
    const double target = params.top_p * sum;
    kept = 0;
    sum = 0.0;
    while (kept < candidates.size() && (kept == 0 || sum < target)) sum += weight(kept++);
  }
  if (params.min_p > 0.0) {
    const std::size_t most = kept;
    kept = 0;
    sum = 0.0;
    while (kept < most && (kept == 0 || weight(kept) >= params.min_p)) sum += weight(kept++);
  }
  const double drawn = params.uniform * sum;
  double reached = 0.0;
  std::size_t i = 0;
  while (i + 1 < kept && (reached += weight(i)) <= drawn) ++i;
  return ranking[i].token;
}

// The first of the largest; as std::max_element, but for one lane a register element.
std::int64_t first_largest(const float* x, std::int64_t count) {
  constexpr std::int64_t kLanes = 32;
  if (count < kLanes) return std::max_element(x, x + count) - x;
  float best[kLanes];
  std::copy_n(x, kLanes, best);
  std::int64_t i = kLanes;
  for (; i + kLanes <= count; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) best[lane] = best[lane] < x[i + lane] ? x[i + lane] : best[lane];
  float largest = *std::max_element(best, best + kLanes);
  for (; i < count; ++i) largest = std::max(largest, x[i]);
  const float* const found = std::find(x, x + count, largest);
  return found == x + count ? 0 : found - x;
}

}  // namespace

std::int32_t choose_token(const float* logits, std::int64_t vocabulary, const Penalties& penalties, const SampleParams& params) {
  const bool is_greedy = params.temperature == 0.0 || params.top_k == 1;
  const bool is_penalized = penalties.repetition != 1.0 || penalties.num_counted > 0;
  if (vocabulary < 1) throw std::invalid_argument("no logits to choose from");
  if (is_greedy && !is_penalized) return static_cast<std::int32_t>(first_largest(logits, vocabulary));
  thread_local std::vector<double> x;
  x.assign(logits, logits + vocabulary);
  penalize(x, penalties);
  const auto best = std::max_element(x.begin(), x.end());
  if (is_greedy) return static_cast<std::int32_t>(best - x.begin());
  thread_local std::vector<Candidate> candidates;
  candidates.resize(x.size());
  const double largest = *best;
  std::size_t count = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double value = (x[i] - largest) / params.temperature;
    candidates[count] = {value, static_cast<std::int32_t>(i)};
    count += value >= kNegligible;
  }
  candidates.resize(count);
  if (params.top_k > 0 && params.top_k < static_cast<std::int64_t>(candidates.size())) {
    put_best_first(candidates, 0, static_cast<std::size_t>(params.top_k));
    candidates.resize(static_cast<std::size_t>(params.top_k));
  }
  return draw(candidates, params);
}

std::vector<LogProb> log_probs(const float* logits, std::int64_t vocabulary, std::int32_t token, std::int64_t num_top) {
  if (token < 0 || token >= vocabulary) throw std::out_of_range("token " + std::to_string(token) + " has no logit");
  const double largest = static_cast<double>(*std::max_element(logits, logits + vocabulary));
  double sum = 0.0;
  for (std::int64_t i = 0; i < vocabulary; ++i) sum += std::exp(static_cast<double>(logits[i]) - largest);
  const double shift = std::log(sum);
  std::vector<Candidate> top;  // best first, at most num_top
  for (std::int64_t i = 0; i < vocabulary && num_top > 0; ++i) {
    const Candidate c{static_cast<double>(logits[i]) - largest, static_cast<std::int32_t>(i)};
    if (static_cast<std::int64_t>(top.size()) == num_top) {
      if (!better(c, top.back())) continue;
      top.pop_back();
    }
    top.insert(std::upper_bound(top.begin(), top.end(), c, better), c);
  }
  std::vector<LogProb> result{{token, static_cast<double>(logits[token]) - largest - shift}};
  for (const Candidate& c : top) result.push_back({c.token, c.value - shift});
  return result;
}

}  // namespace tidegate

// How the next token is chosen. src/tidegate/engine/sampler.py is the plain version, which defines correct; arithmetic is
// float64 here as there. Nothing is ever sorted but the few candidates that a draw walks through.
#pragma once
#include <cstdint>
#include <vector>

namespace tidegate {

// Repetition divides positive and multiplies negative logits of the `seen` tokens (each once, however often it is listed);
// presence and frequency lower those of the `counted` tokens by presence + frequency * counts.
struct Penalties {
  double repetition = 1.0, presence = 0.0, frequency = 0.0;
  const std::int32_t* seen = nullptr;
  std::int64_t num_seen = 0;
  const std::int32_t* counted = nullptr;
  const std::int32_t* counts = nullptr;
  std::int64_t num_counted = 0;
};

struct SampleParams {
  double temperature = 0.0;  // 0: the best token
  std::int64_t top_k = 0;    // 0: all
  double top_p = 1.0, min_p = 0.0;
  double uniform = 0.0;  // the draw, in [0, 1)
};

// A token id. Ties go to the lower one. Throws std::out_of_range on a seen or counted token beyond the vocabulary.
std::int32_t choose_token(const float* logits, std::int64_t vocabulary, const Penalties& penalties, const SampleParams& params);

struct LogProb {
  std::int32_t token;
  double value;
};
// Log probabilities of the model's own distribution: of `token`, then of the `num_top` most probable, best first.
std::vector<LogProb> log_probs(const float* logits, std::int64_t vocabulary, std::int32_t token, std::int64_t num_top);

}  // namespace tidegate

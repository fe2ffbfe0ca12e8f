// Gates that guess at routers, and what is made of their guesses where one token is decoded, in one call each. See
// src/tidegate/models/guesses.py.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "linear.h"
#include "norm.h"
#include "odds.h"
#include "route.h"

namespace tidegate {

// A linear gate on a hidden state. Its bias follows what the router says beyond it: it starts as if a few tokens had told it
// already, and the latest ones count most. Weights and bias belong to somebody else.
class Gate {
 public:
  // `bias` is the weight's own. A guess ranks the `most` best, for a router that chooses `top_k`.
  Gate(Compute& compute, const PackedMatrix& weight, float* bias, std::optional<NormWeights> norm, int top_k, int most);

  // [T, D] -> [T, E], in the workspace.
  Matrix scores(const Matrix& x);
  Ranking guess(const Matrix& x);
  // One row: experts() are the best ones then, margins() theirs. Leaves nothing in the workspace.
  void look(const Matrix& x);
  const std::int32_t* experts() const { return order_.data(); }
  const float* margins() const { return margins_.data(); }
  int top_k() const { return top_k_; }
  int most() const { return most_; }

  // What the router said, on average over the rows of which this gate has spoken last.
  void follow(const float* heard);

 private:
  Compute& compute_;
  const PackedMatrix weight_;
  float* const bias_;
  const std::optional<NormWeights> norm_;
  const int top_k_, most_;
  std::vector<float> said_;  // the mean of the latest rows
  std::int64_t rows_ = 1, told_;
  std::vector<std::int32_t> order_;
  std::vector<float> margins_;
};

// What is guessed about a layer and from it, for steps of one token, and loaded ahead. Gates may be null; all is borrowed.
struct Sight {
  Odds* odds = nullptr;
  int layer = 0;
  Gate *start = nullptr, *before = nullptr;  // at this layer's router: from the layer's start, and from the router before it
  Gate* next = nullptr;                      // at the next layer's router
  LayerCache *here = nullptr, *there = nullptr;  // of this layer and of the next one

  // `x` [1, D]: what the layer's attention is about to read.
  void at_start(const Matrix& x) const;
  // `x` [1, D]: what the layer's router saw, and `heard` said of it; it needs these experts. Odds and biases follow.
  void after_route(const Matrix& x, const std::vector<int>& needed, const float* heard) const;

 private:
  void look(Gate& gate, const Matrix& x, int at, Distance distance, LayerCache& cache) const;
};

}  // namespace tidegate

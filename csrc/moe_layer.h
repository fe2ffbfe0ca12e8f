// A layer of routed experts in one call: its router, a visit of its cache, what is loaded ahead meanwhile, and the experts.
//
// T tokens, K experts per token, D hidden, E experts.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "gate.h"
#include "layer_cache.h"
#include "linear.h"
#include "moe.h"
#include "norm.h"
#include "route.h"

namespace tidegate {

// A layer of routed experts, but for those, and its shared expert if it has one. Pointers are borrowed.
struct MoeLayer {
  NormWeights norm;
  RouterParams router;
  ExpertLayout layout;
  ActivationParams activation;
  std::optional<PackedMatrix> shared_gate_up, shared_down;
};

// A layer's rows after their router: what it saw and chose, and what experts made of that.
struct Routed {
  Matrix normed;                  // [T, D]
  std::vector<std::int32_t> ids;  // [T, K], as `weights`
  std::vector<float> weights;
  std::vector<int> needed;        // the experts, ascending
  int failed_slot = -1;           // its load has failed, and the cache has forgotten the expert
  std::optional<Matrix> shared;   // [T, D] of the shared expert, if there is one
  std::optional<Matrix> out;      // [T, D], the experts' sum; none if the cache does not serve such steps, or a load has failed
};

// norm and route of x [T, D]; then, if the cache serves that, a visit: loads ahead if there is a sight, then hits are computed
// first and each miss as it arrives. Results are in the workspace. Throws std::invalid_argument if the cache has another number of
// experts than the router.
Routed run_moe(Compute& compute, const Matrix& x, const MoeLayer& layer, LayerCache& cache, const Sight* sight);

}  // namespace tidegate

// Whole layers without leaving native code, as long as all the experts that their routers choose are in memory, or a cache serves
// them.
#pragma once
#include <cstdint>
#include <vector>

#include "attention.h"
#include "gate.h"
#include "layer_book.h"
#include "layer_cache.h"
#include "linear.h"
#include "moe.h"
#include "route.h"

namespace tidegate {

// A layer of grouped attention and routed experts. Pointers are borrowed.
struct LayerAtHand {
  NormWeights attention_norm;
  PackedMatrix qkv;
  GroupedAttention attention;
  PackedMatrix out;
  NormWeights moe_norm;
  RouterParams router;
  ExpertLayout layout;
  ActivationParams activation;
  const LayerBook* book = nullptr;
  LayerCache* cache = nullptr;  // where experts can be evicted
};

// norm, projection to queries, keys and values, attend, output projection.
Matrix attention_half(Compute& compute, const KvPages& kv, const Step& step, const GroupedAttention& layer, const Matrix& x,
                      const NormWeights& weights, const PackedMatrix& qkv, const PackedMatrix& out);

struct Progress {
  int halves = 0, experts = 0;
  int failed_slot = -1;  // of a load that a cache waited for
};
// x += scale * y for what each half, attention and experts in turn, makes of x. Stops in front of the first half that wants an
// expert that is not ready or was never used, or that a cache does not serve; returns how many halves were done, and how many
// experts they took that no cache has counted. `sights`: one a layer, or none.
Progress run_at_hand(Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const std::vector<LayerAtHand>& layers,
                     float scale, SlotSource& source, const std::vector<const Sight*>& sights);

}  // namespace tidegate

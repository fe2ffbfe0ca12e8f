// Whole layers without leaving native code, as long as their caches serve the steps.
#pragma once
#include <vector>

#include "attention.h"
#include "gate.h"
#include "layer_cache.h"
#include "linear.h"
#include "moe_layer.h"

namespace tidegate {

// The first half of a layer: norm, projection to queries, keys and values, attend, output projection. Pointers are borrowed.
struct AttentionHalf {
  NormWeights norm;
  PackedMatrix qkv;
  GroupedAttention attention;
  PackedMatrix out;
};
// [T, D] -> [T, D].
Matrix run_attention(Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const AttentionHalf& half);

// A layer of grouped attention and routed experts, and no shared one. `cache` is borrowed.
struct DecoderLayer {
  AttentionHalf attention;
  MoeLayer moe;
  LayerCache* cache = nullptr;
};

struct Progress {
  int halves = 0;        // that were done: a layer has two, attention and experts
  int failed_slot = -1;  // of a load that a cache waited for
};
// x [T, D] += scale * y for what each half in turn makes of x. Stops in front of the first half that a cache does not serve, or
// for which a load has failed. `sights`: one a layer, or none.
Progress run_layers(Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const std::vector<DecoderLayer>& layers,
                    float scale, const std::vector<const Sight*>& sights);

}  // namespace tidegate

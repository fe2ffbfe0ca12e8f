#include "layers.h"

#include "elementwise.h"

namespace tidegate {

Matrix attention_half(Compute& compute, const KvPages& kv, const Step& step, const GroupedAttention& layer, const Matrix& x,
                      const NormWeights& weights, const PackedMatrix& qkv, const PackedMatrix& out) {
  return linear(compute, attend(compute, kv, step, layer, linear(compute, norm(compute, x, weights), qkv)), out);
}

Progress run_layers(Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const std::vector<DecoderLayer>& layers,
                    float scale, const std::vector<const Sight*>& sights) {
  Progress done;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const DecoderLayer& layer = layers[i];
    const Sight* const sight = sights.empty() ? nullptr : sights.at(i);
    {
      const Scratch scratch(compute.workspace);
      if (sight != nullptr) sight->at_start(x);
      add(compute, x, attention_half(compute, kv, step, layer.attention, x, layer.attention_norm, layer.qkv, layer.out), scale);
    }
    ++done.halves;
    const Scratch scratch(compute.workspace);
    const Routed routed = run_moe(compute, x, layer.moe, *layer.cache, sight);
    done.failed_slot = routed.failed_slot;
    if (!routed.out) break;
    add(compute, x, *routed.out, scale);
    ++done.halves;
  }
  return done;
}

}  // namespace tidegate

#include "layers.h"

#include "elementwise.h"

namespace tidegate {

Matrix run_attention(Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const AttentionHalf& half) {
  const Matrix qkv = linear(compute, norm(compute, x, half.norm), half.qkv);
  return linear(compute, attend(compute, kv, step, half.attention, qkv), half.out);
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
      add(compute, x, run_attention(compute, kv, step, x, layer.attention), scale);
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

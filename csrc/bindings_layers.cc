// Python's view of whole layers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "bindings.h"
#include "layers.h"

using namespace tidegate;

namespace {

void bind_moe_layer(nb::module_& m) {
  nb::class_<MoeLayer>(m, "MoeLayer", "A layer of routed experts, but for those; see moe_layer.h.")
      .def("__init__", [](MoeLayer* self, const NormWeights& norm, const RouterParams& router, const ExpertLayout& layout,
                          const ActivationParams& activation, const PackedMatrix* gate_up, const PackedMatrix* down) {
        new (self) MoeLayer{norm, router, layout, activation, gate_up ? std::optional(*gate_up) : std::nullopt,
                            down ? std::optional(*down) : std::nullopt};
      }, "norm"_a, "router"_a, "layout"_a, "activation"_a, "shared_gate_up"_a.none(), "shared_down"_a.none(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>());
  nb::class_<Routed>(m, "Routed", "A layer's rows that the cache did not serve; see moe_layer.h.")
      .def_ro("failed_slot", &Routed::failed_slot)
      .def("routing", [](const Routed& r) {
        const auto num_pairs = static_cast<std::int64_t>(r.ids.size()), rows = r.normed.rows, k = rows == 0 ? 0 : num_pairs / rows;
        const auto ids = new_numpy<std::int32_t>(rows, k);
        const auto weights = new_numpy<float>(rows, k);
        std::copy(r.ids.begin(), r.ids.end(), ids.data());
        std::copy(r.weights.begin(), r.weights.end(), weights.data());
        return nb::make_tuple(ids, weights);
      }, "Expert ids and weights [T, K].");
  m.def("run_moe", [](Compute& compute, const Matrix& x, const MoeLayer& layer, LayerCache& cache, const Sight* sight) {
    Routed r;
    {
      const nb::gil_scoped_release released;
      r = run_moe(compute, x, layer, cache, sight);
    }
    const Matrix normed = r.normed;
    const std::optional<Matrix> out = r.out, shared = r.shared;
    return nb::make_tuple(normed, out, shared, out ? nb::none() : nb::cast(std::move(r)));
  }, "compute"_a, "x"_a, "layer"_a, "cache"_a, "sight"_a.none(),
        "(the normed rows, the experts' sum, the shared expert, None); or no sum and what was routed if the cache does not serve "
        "such a step, or a load has failed.");
}

}  // namespace

void bind_layers(nb::module_& m) {
  bind_moe_layer(m);
  nb::class_<AttentionHalf>(m, "AttentionHalf", "Grouped attention as a layer has it; see layers.h.")
      .def("__init__", [](AttentionHalf* self, const NormWeights& norm, const PackedMatrix& qkv, const GroupedAttention& attention,
                          const PackedMatrix& out) { new (self) AttentionHalf{norm, qkv, attention, out}; },
           "norm"_a, "qkv"_a, "attention"_a, "out"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
  nb::class_<DecoderLayer>(m, "DecoderLayer", "A layer of grouped attention and routed experts; see layers.h.")
      .def("__init__", [](DecoderLayer* self, const AttentionHalf& attention, const MoeLayer& moe, LayerCache& cache) {
        new (self) DecoderLayer{attention, moe, &cache};
      }, "attention"_a, "moe"_a, "cache"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  // A list of them that need not be read anew for every step.
  using Layers = std::vector<DecoderLayer>;
  struct Stack {
    Layers layers;
  };
  nb::class_<Stack>(m, "Layers", "Layers in their order.")
      .def("__init__", [](Stack* self, const Layers& layers) { new (self) Stack{layers}; }, "layers"_a, nb::keep_alive<1, 2>());
  m.def("attention", &run_attention, "compute"_a, "kv"_a, "step"_a, "x"_a, "half"_a, NoGil(),
        "norm, linear, attend and linear in one call.");
  m.def("run_layers", [](Compute& compute, const KvPages& kv, const Step& step, const Matrix& x, const Stack& stack, float scale,
                         const std::vector<const Sight*>& sights) {
    const nb::gil_scoped_release released;
    const Progress done = run_layers(compute, kv, step, x, stack.layers, scale, sights);
    return std::tuple(done.halves, done.failed_slot);
  }, "compute"_a, "kv"_a, "step"_a, "x"_a, "layers"_a, "scale"_a, "sights"_a,
        "How many halves of layers were done, x changed by them, and the slot whose load has failed, or -1; see layers.h.");
}
